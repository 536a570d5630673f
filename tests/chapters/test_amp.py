"""Chapter 6: what its cells show is true, and its step is the step that memlab runs."""

import math
import re

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import MiB, Recipe, SimulatedGPU, Training, formula, models, simulate
from memlab.book.chapters.amp_bytes import first_saving_batch, formats_by_operation, trainer_formats
from memlab.book.chapters.amp_training import gains, printed_loop

NOTEBOOK, DEEPER = Notebook("06-amp"), Notebook("06-amp-deeper")
TINY = "imports reader gradients"
DTYPES = {"fp16-amp": torch.float16, "bf16-amp": torch.bfloat16}


@pytest.fixture(scope="module")
def chapter():
    before = torch.get_num_threads()
    yield NOTEBOOK.run(TINY, {"display": print})
    torch.set_num_threads(before)  # the chapter takes one


@pytest.fixture(scope="module")
def deeper():
    before = torch.get_num_threads()
    yield DEEPER.run("imports listen")
    torch.set_num_threads(before)


@pytest.mark.parametrize("precision", DTYPES)
def test_the_shown_step_and_the_recipes_step_agree(chapter, precision):
    NOTEBOOK.run("amp-step", chapter)
    recipe = Recipe("bert-large-tiny", batch_size=1, seq_len=16, precision=precision)
    shown, library = Training(recipe), Training(recipe)

    def shown_step():
        parts = shown.model, shown.optimizer, shown.scaler, shown.batches[0]
        return chapter["amp_step"](*parts, DTYPES[precision])

    assert_same_run(traced(shown, shown_step), traced(library, library.step))


def test_small_gradients_are_lost_in_fp16_and_the_scale_brings_them_back(chapter):
    NOTEBOOK.run("lost-run", chapter)
    lost = chapter["lost"]
    assert lost["fp16"] > 0.5 and chapter["infinite"] == 0
    assert max(lost[n] for n in ("fp16, scale 2^16", "bf16")) < 0.01
    true, found = (chapter["gradients"](d, window=1) for d in (None, torch.float16))
    assert (found == 0)[true != 0].double().mean() < 0.01  # 256 tokens a step


def test_autocast_runs_products_in_half_and_softmax_norms_and_the_loss_in_fp32(deeper):
    DEEPER.run("listen-run", deeper)
    cuda, cpu = deeper["on_cuda"], deeper["here"]
    for op in ("addmm", "bmm", "gelu"):
        assert cuda.gives[op] == cpu.gives[op] == {"float16"}
    for op in ("embedding", "native_layer_norm", "_softmax", "nll_loss_forward"):
        assert cuda.gives[op] == {"float32"}
    # cross_entropy asks it for the dtype of its input, which CUDA's autocast lets be.
    assert (cuda.gives["_log_softmax"], cpu.gives["_log_softmax"]) == ({"float16"}, {"float32"})
    assert cpu.gives["_softmax"] == {"float16"}
    there, on_cpu = (formats_by_operation({"": heard.gives})[""] for heard in (cuda, cpu))
    assert [*there.index[there != on_cpu]] == ["softmax", "loss, first half"]  # as the text says
    model = deeper["models"].build(deeper["one_layer"])
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    multiplied = sum(p.numel() for m in linear for p in m.parameters())
    assert cuda.copies == cpu.copies == 2 * multiplied


def test_the_curve_crosses_between_one_and_two_sequences_by_the_weights_copies(chapter):
    NOTEBOOK.run("curve curve-lines curve-words", chapter)
    full, mixed = ([f.peak_allocated for f in line] for line in chapter["curve"].values())
    assert mixed[0] > full[0] and all(b < a for a, b in zip(full[1:], mixed[1:], strict=True))
    with torch.device("meta"):
        model = models.build("bert-large")
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    multiplied = sum(p.numel() for m in linear for p in m.parameters())
    # All but the pooler's, which comes after the peak, and the biases'.
    assert chapter["copied"] == pytest.approx(2 * multiplied, rel=0.01)
    assert mixed[0] == pytest.approx(simulate(chapter["fp16"]).peak_allocated, rel=1e-4)
    assert 8 < first_saving_batch(chapter["saving"]) < 20  # under checkpointing


def test_dropping_gradients_takes_the_cost_away(chapter):
    NOTEBOOK.run("today", chapter)
    change = chapter["today"]["change, %"]
    assert abs(change[1]) < 1e-3 and abs(change[2]) < 0.1  # the scaler is a few numbers
    assert change[8] < change[4] < -5
    for batch in (1, 2):
        recipe = Recipe("bert-large", batch_size=batch, attention="sdpa")
        assert formula(recipe.but(precision="fp16-amp")).peak_phase == "optimizer step"
    for kind, peak in chapter["today"].loc[2, ["fp32", "fp16-amp"]].items():
        found = simulate(recipe.but(precision=kind))
        assert found.peak_allocated == pytest.approx(peak * MiB, rel=1e-4)


def test_live_and_predicted_differ_by_the_softmax_alone(chapter):
    NOTEBOOK.run("curve live", chapter)
    for precision, (predicted, measured) in chapter["live"].items():
        quiet = chapter["quiet"]
        gap = predicted.peak_tensors - measured.footprint.peak_tensors
        softmax = 4 * quiet.num_hidden_layers * 2 * quiet.num_attention_heads * 128**2
        expected = softmax if "amp" in precision else 0
        assert abs(gap - expected) < 1000, precision  # AdamW's step counters


def test_with_a_fused_step_fp16_saves_from_three_sequences_on():
    def saved(size):
        full = Recipe("bert-large", batch_size=size, seq_len=512, attention="sdpa")
        full = full.but(optimizer="adamw_torch_fused")
        half = full.but(precision="fp16-amp")
        return 1 - formula(half).peak_allocated / formula(full).peak_allocated

    assert saved(2) < 0.01 < 0.04 < saved(3)


def test_at_rest_autocast_and_fp32_and_a_master_hold_sixteen_bytes(chapter):
    chapter["live"] = dict.fromkeys(("fp32", "fp16-amp", "bf16-amp", "bf16"))
    chapter["live_recipe"] = Recipe("bert-large-tiny", None, 1, 16, set_to_none=False)
    NOTEBOOK.run("master rest", chapter)
    expected = {"fp32": 16, "fp16-amp": 16, "bf16-amp": 16, "bf16": 8, "bf16 + master": 16}
    assert chapter["sums"] == pytest.approx(expected)
    amp = chapter["amp"]
    assert amp["weights"] == amp["gradients"] == (4, "float32")


def test_a_scaler_backs_off_skips_and_grows(chapter):
    NOTEBOOK.run("amp-step life-run", chapter)
    scales, skipped = chapter["scales"], chapter["skipped"]
    assert skipped[:2] == [0, 1] and scales[1] == scales[0] / 2
    ratios = {b / a for a, b in zip(scales, scales[1:], strict=False)}
    assert ratios == {0.5, 1, 2}
    assert all(scales[step + 1] == scales[step] / 2 for step in skipped if step + 1 < len(scales))


@pytest.mark.slow
def test_without_zero_grad_the_first_overflow_ends_the_training(chapter):
    NOTEBOOK.run("published-loop-run", chapter)
    late, fallen = chapter["late"], chapter["fallen"]
    assert fallen["fp16, not cleared"] < 1 < fallen["fp16, cleared"]
    assert late["fp16, not cleared"] > late["fp16, cleared"] + 0.1
    model = chapter["reader"]()
    scaler = torch.amp.GradScaler("cpu")
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), torch.inf)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        scaler.scale(
            model(input_ids=chapter["seen"][:1], labels=chapter["seen"][:1]).loss
        ).backward()
        scaler.step(adamw)
        scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 2.0**13


def test_a_loss_outside_autocast_is_fp16_and_no_step_is_taken(chapter):
    before = chapter | {"printed_loop": printed_loop}
    found = NOTEBOOK.run("outside-code outside-falling", before)
    assert found["inside"] == ("float32", True) and found["outside"] == ("float16", False)
    assert found["falling"] == [2.0 ** (15 - step) for step in range(20)]


def test_clipping_before_unscaling_takes_the_step_away(deeper):
    DEEPER.run("reader-text reader", deeper)
    for kind, least in ((torch.optim.SGD, 2**14), (torch.optim.AdamW, 1)):
        right, wrong = (deeper["update_length"](first, kind) for first in (True, False))
        assert least < right / wrong < 20 * least


def test_fp16_weights_die_and_the_scaler_refuses_them(chapter):
    NOTEBOOK.run("pure-half pure-read", chapter)
    assert chapter["died"] and "FP16" in chapter["refused"]
    assert all(map(math.isfinite, chapter["losses"]["fused"][:3]))  # computes in fp32


@pytest.mark.slow
def test_bf16_weights_need_a_master_or_chance(chapter):
    NOTEBOOK.run("master stochastic rounded tune", chapter)
    found = gains(chapter["tunings"], (chapter["unseen"], chapter["seen"]), seeds=1)
    gain, still = found["seed 0"], found["never moved"]
    assert gain["bf16"] < 0.5 * gain["fp32"] and still["fp32"] < 0.01 and still["bf16"] > 0.5
    assert min(gain["bf16, by chance"], gain["bf16 + master"]) > 0.7 * gain["fp32"]


def test_a_second_moment_in_bf16_never_falls():
    """A thousandth of any bf16 number is less than half the distance to the one below."""
    assert "a thousandth of it" in NOTEBOOK.text["stochastic-words"]
    moments = torch.arange(1, 2, 2**-7).bfloat16()
    assert torch.equal(moments * 0.999, moments)


def test_a_module_is_taken_out_of_autocast_and_t5_has_one_that_asks_for_it():
    from transformers import T5PreTrainedModel

    names, layer = {"torch": torch}, torch.nn.Linear(4, 4)
    exec(re.search(r"```python\n(.*?)```", NOTEBOOK.text["life-words"], re.DOTALL)[1], names)
    names["out_of_autocast"](layer)
    with torch.autocast("cpu"):
        assert layer(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.float32
    assert T5PreTrainedModel._keep_in_fp32_modules == ["wo"]


def test_rounding_by_chance_gives_the_two_neighbours_and_the_number_on_average(chapter):
    NOTEBOOK.run("master stochastic", chapter)
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


def test_a_bf16_checkpoint_trains_in_bf16_until_told(chapter):
    NOTEBOOK.run("loaded-run", chapter)
    for name, format in {"trap": "bfloat16", "cure": "float32"}.items():
        assert chapter[name]["weights"] == chapter[name]["moments"] == format


def test_the_trainer_ignores_fp16_on_a_cpu_and_obeys_on_a_card(chapter):
    NOTEBOOK.run("loaded-run trainer-run", chapter)
    gave = "linear layer gave"
    # Once the Trainer refuses or obeys here, this fails: then the chapter's words can go.
    assert (chapter["asked"][gave], chapter["asked"]["scaler"]) == ("float32", "none")
    assert chapter["cure"][gave] == "bfloat16" and chapter["cure"]["scaler"] == "none"
    with SimulatedGPU("H100"):
        found = trainer_formats(models.build("gpt2-tiny"), chapter["seen"][:8], fp16=True)
    assert (found[gave], found["scaler"]) == ("float16", "GradScaler")


def test_accelerates_loop_is_the_loop_by_hand(deeper):
    DEEPER.run("reader-text reader accelerate-code accelerate-loop", deeper)
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


@pytest.mark.parametrize("number, wrong", [(1, 5), (2, 20), (3, 2)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    NOTEBOOK.run({1: "counted", 2: "buggy", 3: ""}[number], chapter)
    NOTEBOOK.check_exercise(number, wrong, chapter, capsys)


def test_the_deeper_exercise_takes_its_solution(deeper, capsys):
    DEEPER.run("copies", deeper)
    DEEPER.check_exercise(1, 162.0, deeper, capsys)
