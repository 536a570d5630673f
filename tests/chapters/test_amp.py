"""Chapter 6: its step is the step that memlab runs, its rounding is by chance."""

import re

import pytest
import torch
from notebook import Notebook, assert_steps_agree, cells_of

from memlab import Recipe, Training

NOTEBOOK = Notebook("06-amp")
DTYPES = {"fp16-amp": torch.float16, "bf16-amp": torch.bfloat16}


chapter = cells_of("06-amp", "imports settings amp-step master stochastic")


@pytest.mark.parametrize("precision", DTYPES)
def test_the_shown_step_and_the_recipes_step_agree(chapter, precision):
    recipe = Recipe("bert-large-tiny", batch_size=1, seq_len=16, precision=precision)
    shown, library = Training(recipe), Training(recipe)
    parts = shown.model, shown.optimizer, shown.scaler, shown.batches[0], DTYPES[precision]
    assert_steps_agree(shown, lambda: chapter["amp_step"](*parts), library)


def test_a_module_is_taken_out_of_autocast():
    names, layer = {"torch": torch}, torch.nn.Linear(4, 4)
    exec(re.search(r"```python\n(.*?)```", NOTEBOOK.text["life-words"], re.DOTALL)[1], names)
    names["out_of_autocast"](layer)
    with torch.autocast("cpu"):
        assert layer(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.float32


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
