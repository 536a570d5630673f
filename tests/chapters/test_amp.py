"""Chapter 6: what its cells show is true, and its step is the step that memlab runs."""

import math

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, simulate
from memlab.workloads.training import Training

NOTEBOOK, DEEPER = Notebook("06-amp"), Notebook("06-amp-deeper")
TINY = "imports published-records reader gradients gradients-figure"
DTYPES = {"fp16-amp": torch.float16, "bf16-amp": torch.bfloat16}


@pytest.fixture(scope="module")
def chapter():
    before = torch.get_num_threads()
    yield NOTEBOOK.run(TINY)
    torch.set_num_threads(before)  # the chapter takes one


@pytest.fixture(scope="module")
def deeper():
    before = torch.get_num_threads()
    yield DEEPER.run("imports listen reader")
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
    fates = chapter["fates"]
    assert fates["256", "fp16"]["lost"] < 0.01
    assert fates["4,194,304", "fp16"]["lost"] > 0.5
    assert fates["4,194,304", "fp16, scale 2^16"]["lost"] < 0.01
    assert fates["4,194,304", "bf16"]["lost"] < 0.01
    assert all(fate["too large"] == 0 for fate in fates.values())


def test_modules_under_autocast_give_what_their_operations_give(chapter):
    NOTEBOOK.run("asked asked-words", chapter)  # asserts
    assert chapter["gave"]["Linear"] == {torch.float16}


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
    steps = DEEPER.run("listen-table listen-words", deeper)["steps"]
    differ = [what for op, what in steps.items() if cuda.gives[op] != cpu.gives[op]]
    assert differ == ["softmax", "loss, first half"]  # as the text says
    model = deeper["models"].build(deeper["one_layer"])
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    multiplied = sum(p.numel() for m in linear for p in m.parameters())
    assert cuda.copies == cpu.copies == 2 * multiplied


def test_what_is_kept_for_backward_is_not_halved(chapter):
    NOTEBOOK.run("saved saved-run", chapter)
    fp32, fp16 = (chapter["by_format"][name] for name in ("fp32", "fp16 autocast"))
    assert "float16" not in fp32 and fp16["bool"] == fp32["bool"]
    assert fp16["float16"] > fp16["float32"] > 0.2 * fp32["float32"]
    assert 0.6 < fp16.sum() / fp32.sum() < 0.9


def test_the_curve_crosses_between_one_and_two_sequences_by_the_weights_copies(chapter):
    NOTEBOOK.run("curve curve-lines split", chapter)
    assert 1 < chapter["crossing"] < 2
    with torch.device("meta"):
        model = chapter["models"].build("bert-large")
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    multiplied = sum(p.numel() for m in linear for p in m.parameters())
    # All but the pooler's, which comes after the peak, and the biases'.
    assert chapter["copied"] == pytest.approx(2 * multiplied, rel=0.01)
    assert chapter["none"] < 0.01 * chapter["copied"]
    peak = chapter["curve"]["fp16 autocast"][0].peak_allocated
    assert peak == pytest.approx(simulate(chapter["fp16"]).peak_allocated, rel=1e-4)


def test_checkpointing_moves_the_crossing_and_dropping_gradients_takes_the_cost_away(chapter):
    NOTEBOOK.run("curve curve-lines checkpointed today", chapter)
    assert 8 < chapter["late_win"] < 20
    pairs = chapter["peak_of"]
    peaks = {key: [run.peak_allocated for run in pair] for key, pair in pairs.items()}
    for attention in ("eager", "sdpa"):
        one, same = peaks[attention, 1]
        assert same == pytest.approx(one, rel=1e-6)  # the scaler is a few numbers
        assert pairs[attention, 1][0].peak_phase == "optimizer step"
        assert peaks[attention, 4][1] < 0.95 * peaks[attention, 4][0]
    assert peaks["eager", 2][1] < 0.97 * peaks["eager", 2][0]
    assert peaks["sdpa", 2][1] == pytest.approx(peaks["sdpa", 2][0], rel=1e-3)
    for kind, peak in zip(("fp32", "fp16-amp"), peaks["sdpa", 2], strict=True):
        recipe = Recipe("bert-large", batch_size=2, attention="sdpa", precision=kind)
        assert simulate(recipe).peak_allocated == pytest.approx(peak, rel=1e-4)
    fused = Recipe("bert-large", optimizer="adamw_torch_fused")
    bare, mixed = (simulate(fused.but(precision=kind)) for kind in ("fp32", "fp16-amp"))
    assert bare.peak_phase == mixed.peak_phase == "backward"
    assert 1 < mixed.peak_allocated / bare.peak_allocated < 1.05


def test_live_and_predicted_differ_by_the_softmax_alone(chapter):
    NOTEBOOK.run("curve live", chapter)
    for precision, (predicted, measured) in chapter["live"].items():
        quiet = chapter["quiet"]
        gap = predicted.peak_tensors - measured.footprint.peak_tensors
        softmax = 4 * quiet.num_hidden_layers * 2 * quiet.num_attention_heads * 128**2
        expected = softmax if "amp" in precision else 0
        assert abs(gap - expected) < 1000, precision  # AdamW's step counters


def test_at_rest_autocast_and_fp32_and_a_master_hold_sixteen_bytes(chapter):
    chapter["live"] = dict.fromkeys(("fp32", "fp16-amp", "bf16-amp", "bf16"))
    chapter["live_recipe"] = Recipe("bert-large-tiny", None, 1, 16, set_to_none=False)
    NOTEBOOK.run("master rest rest-run", chapter)
    held = {name: sum(n for n, _ in row.values()) for name, row in chapter["rest"].items()}
    expected = {"fp32": 16, "fp16-amp": 16, "bf16-amp": 16, "bf16": 8, "bf16 + master": 16}
    assert held == pytest.approx(expected)
    amp = chapter["rest"]["fp16-amp"]
    assert amp["weights"] == amp["gradients"] == (4, "float32")


def test_scaled_fp16_and_bf16_learn_like_fp32_and_unscaled_fp16_does_not(chapter):
    NOTEBOOK.run("learn-code", chapter)
    ends = {way: chapter["learn"](way, 1)[-1] for way in chapter["WAYS"]}
    start = chapter["learn"]("fp32", 1, steps=1)[0]
    assert ends["fp32"] < start - 0.5
    assert ends["bf16 autocast"] == pytest.approx(ends["fp32"], abs=0.03)
    assert ends["fp16, scaled"] == pytest.approx(ends["fp32"], abs=0.03)
    assert ends["fp16, unscaled"] > ends["fp32"] + 0.2
    few = {way: chapter["learn"](way, 1, window=1)[-1] for way in ("fp32", "fp16, unscaled")}
    assert few["fp16, unscaled"] == pytest.approx(few["fp32"], abs=0.01)  # 256 tokens a step


def test_a_scaler_backs_off_skips_and_grows(chapter):
    NOTEBOOK.run("amp-step life-code life-run", chapter)
    scales, skipped = chapter["scales"], chapter["skipped"]
    assert skipped[:2] == [0, 1] and scales[1] == scales[0] / 2
    ratios = {b / a for a, b in zip(scales, scales[1:], strict=False)}
    assert ratios == {0.5, 1, 2}
    assert all(scales[step + 1] == scales[step] / 2 for step in skipped if step + 1 < len(scales))


def test_without_zero_grad_the_first_overflow_ends_the_training(chapter):
    NOTEBOOK.run("published-loop published-loop-run", chapter)
    (_, right), (_, stuck) = (chapter["loops"][f"fp16, {n}"] for n in ("cleared", "not cleared"))
    assert stuck[-1] < 1 < min(right)
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


def test_a_loss_outside_autocast_is_fp16_and_limits_the_scale(chapter):
    NOTEBOOK.run("published-loop outside-code", chapter)
    measure = chapter["loss_and_gradients"]
    assert measure(True, 2.0**16) == ("float32", True)
    assert measure(False, 2.0**15) == ("float16", True)
    assert not measure(False, 2.0**16)[1]
    _, scales = chapter["published_loop"](True, inside=False, interval=2000, steps=4)
    assert scales == [2.0**15] * 4  # cleared: one step is lost, and no more


def test_clipping_before_unscaling_takes_the_step_away(deeper):
    right, wrong = (deeper["update_length"](first, torch.optim.SGD) for first in (True, False))
    assert right / wrong > 2**14
    DEEPER.run("clip-run clip-words", deeper)  # asserts


def test_fp16_weights_die_and_bf16_weights_need_a_master(chapter):
    NOTEBOOK.run("pure-half pure-read master stochastic rounded tune", chapter)
    assert chapter["died"] and "FP16" in chapter["refused"]
    assert all(map(math.isfinite, chapter["losses"]["fused"][:3]))  # computes in fp32
    base = chapter["pretrained"](40)
    ways = ("fp32", "bf16", "bf16 + master", "bf16, by chance")
    gains = {k: chapter["tuned"](base, k, 0, 3e-5) for k in ways}
    assert gains["bf16, by chance"][0] > 0.7 * gains["fp32"][0]
    assert gains["bf16"][0] < 0.5 * gains["fp32"][0]
    assert gains["bf16 + master"][0] > 0.7 * gains["fp32"][0]
    assert gains["fp32"][1] < 0.01 and gains["bf16"][1] > 0.5


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
    NOTEBOOK.run("loaded loaded-run", chapter)
    assert set(chapter["trap"]) == {torch.bfloat16} and set(chapter["cure"]) == {torch.float32}


def test_the_trainer_ignores_fp16_on_a_cpu_and_obeys_on_a_card(chapter):
    NOTEBOOK.run("loaded trainer trainer-run", chapter)
    asked = chapter["asked"]
    # Once the Trainer refuses or obeys here, this fails: then the chapter's words can go.
    assert asked["fp16=True", "here: cpu"] == ("float32", "none")
    assert asked["fp16=True", "simulated H100"] == ("float16", "GradScaler")
    assert asked["bf16=True", "here: cpu"] == asked["bf16=True", "simulated H100"]
    assert asked["bf16=True", "here: cpu"] == ("bfloat16", "none")


def test_accelerates_loop_is_the_loop_by_hand(deeper):
    DEEPER.run("accelerate-code accelerate-loop accelerate-run", deeper)  # asserts


@pytest.mark.parametrize("number, wrong", [(1, 5), (2, 20), (3, 2)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    NOTEBOOK.run(
        {1: "counted", 2: "buggy counting", 3: "curve curve-lines gap-at"}[number], chapter
    )
    NOTEBOOK.check_exercise(number, wrong, chapter, capsys)


def test_the_deeper_exercise_takes_its_solution(deeper, capsys):
    DEEPER.run("copies", deeper)
    DEEPER.check_exercise(1, 162.0, deeper, capsys)
