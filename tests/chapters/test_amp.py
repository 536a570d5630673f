"""Chapter 6: its step is the step that memlab runs, its rounding is by chance."""

import re

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, Training

NOTEBOOK, DEEPER = Notebook("06-amp"), Notebook("06-amp-deeper")
DTYPES = {"fp16-amp": torch.float16, "bf16-amp": torch.bfloat16}


@pytest.fixture(scope="module")
def chapter():
    before = torch.get_num_threads()
    yield NOTEBOOK.run("imports settings reader asked amp-step master stochastic")
    torch.set_num_threads(before)  # the chapter takes one


@pytest.fixture(scope="module")
def deeper():
    before = torch.get_num_threads()
    yield DEEPER.run("imports reader-text accelerate-code accelerate-loop")
    torch.set_num_threads(before)


@pytest.mark.parametrize("precision", DTYPES)
def test_the_shown_step_and_the_recipes_step_agree(chapter, precision):
    recipe = Recipe("bert-large-tiny", batch_size=1, seq_len=16, precision=precision)
    shown, library = Training(recipe), Training(recipe)

    def shown_step():
        parts = shown.model, shown.optimizer, shown.scaler, shown.batches[0]
        return chapter["amp_step"](*parts, DTYPES[precision])

    assert_same_run(traced(shown, shown_step), traced(library, library.step))


def test_modules_under_autocast_give_what_cudas_list_says(chapter):
    gave = chapter["gave"]
    assert gave["Linear"] == {torch.float16}
    assert gave["Embedding"] == gave["LayerNorm"] == {torch.float32}
    assert gave["the loss"] == gave["every .grad"] == {torch.float32}


def test_a_module_is_taken_out_of_autocast_and_t5_has_one_that_asks_for_it():
    from transformers import T5PreTrainedModel

    names, layer = {"torch": torch}, torch.nn.Linear(4, 4)
    exec(re.search(r"```python\n(.*?)```", NOTEBOOK.text["life-words"], re.DOTALL)[1], names)
    names["out_of_autocast"](layer)
    with torch.autocast("cpu"):
        assert layer(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.float32
    assert T5PreTrainedModel._keep_in_fp32_modules == ["wo"]


def test_rounding_by_chance_gives_the_two_neighbours_and_the_number_on_average(chapter):
    torch.manual_seed(0)
    for value in (1.001, -3.1415, 1e-6, 0.0, 2.0):
        x = torch.full((20_000,), value)
        found = chapter["by_chance"](x)
        assert found.dtype == torch.bfloat16
        near = sorted(set(found.float().tolist()))
        gap = abs(value) * 2**-7
        assert all(abs(n - value) <= gap for n in near) and len(near) <= 2
        assert found.double().mean().item() == pytest.approx(value, abs=0.02 * gap + 1e-12)
        if x[0].bfloat16().float() == x[0]:
            assert near == [x[0].item()]  # what bf16 has stays


def test_accelerates_loop_is_the_loop_by_hand(deeper):
    model, losses = deeper["reader"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    for rows in deeper["seen"][:64].split(8):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=rows, labels=rows).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert deeper["theirs"] == pytest.approx(losses, rel=0.01)
