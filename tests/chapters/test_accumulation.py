"""Chapter 4: what its cells show is true, and its loop is the loop that memlab runs."""

from types import SimpleNamespace

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, Training, find_gpu, simulate
from memlab.book.chapters.accumulation import (
    distance,
    flat_gradient,
    paragraphs,
    peak_of,
    reader,
    split,
    trained,
)

CHAPTER, DEEPER = Notebook("04-accumulation"), Notebook("04-accumulation-deeper")
# Cells that train tiny models only, in the order of the page.
TINY = """imports vanilla-loop accumulated-loop idea-whole idea-parts reader gradient-function
    gradient-run unequal summed-loss by-tokens unequal-mended bad-fix-code dropout-run"""
DEEPER_TINY = """imports text right slip slip-right slip-run slip-mended slip-table leftover shares
    leftover-run leftover-fixed half-grad-sum half-grad-table half-grad-fix-code
    half-grad-fix-run"""


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(TINY)


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run(DEEPER_TINY)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["bert-large-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("optimizer", ["adamw_torch_loop", "adamw_torch", "sgd"])
def test_the_shown_loop_and_the_recipes_loop_agree(chapter, model, shape, optimizer):
    size, count = shape
    recipe = Recipe(model, None, size, 32, count, optimizer=optimizer)
    shown, library = Training(recipe), Training(recipe)

    def shown_step():
        return chapter["accumulated_step"](shown.model, shown.optimizer, shown.batches)

    assert_same_run(traced(shown, shown_step), traced(library, library.step))


def test_with_one_micro_batch_the_changed_loop_is_the_vanilla_one(chapter):
    recipe = Recipe("bert-large-tiny", batch_size=4, seq_len=32)
    vanilla, changed = Training(recipe), Training(recipe)
    torch.manual_seed(1)
    before = chapter["vanilla_step"](vanilla.model, vanilla.optimizer, vanilla.batches[0])
    torch.manual_seed(1)
    after = chapter["accumulated_step"](changed.model, changed.optimizer, changed.batches)
    assert before == after
    for one, other in zip(vanilla.model.parameters(), changed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_lone_micro_batch_peaks_lower_than_one_under_accumulation():
    recipe = Recipe("bert-large-tiny", batch_size=8, seq_len=512, optimizer="adamw_torch_loop")
    alone, two = (simulate(recipe.but(accumulation=n)) for n in (1, 2))
    gradients = two.breakdown["gradients"] - alone.breakdown["gradients"]
    assert gradients > 0.8 * two.breakdown["parameters"]
    assert two.peak_tensors > alone.peak_tensors
    kept = simulate(recipe.but(set_to_none=False))
    assert abs(kept.peak_tensors - two.peak_tensors) < 0.01 * two.peak_tensors


def test_from_two_micro_batches_on_the_peak_stays():
    recipe = Recipe("bert-large-tiny", None, 4, 128, optimizer="adamw_torch_loop")
    trainings = {n: Training(recipe.but(accumulation=n)) for n in (1, 2, 3, 5)}
    peaks = {n: traced(training, training.step)[1] for n, training in trainings.items()}
    assert peaks[1].peak_allocated < 0.95 * peaks[2].peak_allocated
    # But for the token ids of each further micro-batch, and its loss, which is one number.
    without = {n: peak.peak_allocated - peak.breakdown["inputs"] for n, peak in peaks.items()}
    assert all(0 <= without[n] - without[2] <= 8 * n for n in (3, 5))


def test_the_idea_ends_on_the_gradient_of_the_whole_batch(chapter):
    assert chapter["seen"][-1] == pytest.approx(chapter["whole"], rel=1e-5)
    assert chapter["seen"][1] != pytest.approx(chapter["whole"], rel=1e-2)


def test_the_accumulated_gradient_is_the_big_batchs(chapter):
    single, double = chapter["apart"].values()
    assert 0 < double < 1e-14 < single < 1e-6


def test_unequal_token_counts_fail_and_are_fixed(chapter):
    assert len(set(chapter["counts"])) > 1
    assert chapter["mean_of_means"] > 0.05
    assert chapter["by_tokens"] < 1e-6


def test_the_bad_fix_is_right_and_holds_every_graph(chapter):
    gradients, peaks = [], []
    for name in ("backward_by_tokens", "backward_at_the_end"):
        model = reader()
        chapter[name](model, chapter["windows"])
        gradients.append(flat_gradient(model))
        peaks.append(peak_of(chapter[name]))
    assert distance(*gradients) < 1e-5 and peaks[1] > 1.4 * peaks[0]


def test_a_short_last_window_fails_in_both_loops_and_is_fixed(deeper):
    assert deeper["at_end"] == pytest.approx([1, 1, 0.5] * 2, abs=1e-4)
    assert len(deeper["never"]) == 4  # no step for the third window
    assert deeper["never"][:2] == pytest.approx([1, 1], abs=1e-4)
    assert deeper["never"][2] > 1.1  # what the epoch before left behind
    assert deeper["fixed"] == pytest.approx([1] * 6, abs=1e-4)


def test_dropout_differs_and_eval_does_not(chapter):
    model, batch = reader(dropout=0.1).eval(), chapter["batch"]
    one, four = (chapter["gradient"](model, split(batch, count)).clone() for count in (1, 4))
    assert chapter["masks"] > 0.05 and distance(four, one) < 1e-6


def test_a_sum_in_bf16_loses_what_a_sum_in_fp32_keeps(deeper):
    lost = deeper["lost"]
    assert lost["bf16: distance"].is_monotonic_increasing
    assert lost.loc[1024, "bf16: distance"] > 10 * lost.loc[16, "bf16: distance"]
    assert lost.loc[1024, "bf16: length"] < 0.95
    assert lost["fp32: distance"].max() < 0.005
    assert deeper["in_hook"] < lost.loc[16, "bf16: distance"]
    weights = list(deeper["half"].parameters())
    assert {p.total.dtype for p in weights} == {torch.float32}
    assert {p.grad.dtype for p in weights} == {torch.bfloat16}


@pytest.mark.slow
def test_accumulation_learns_as_the_big_batch_does(chapter):
    CHAPTER.run("learn-run learn-words", chapter)
    assert max(chapter["ends"]["1 x 1"]) < min(chapter["ends"]["16 x 1"])  # as the text says
    for big, cut, ones in zip(*chapter["curves"].values(), strict=True):
        assert cut == pytest.approx(big, abs=1e-3) and len(ones) == len(big) == 4
        assert big[-1] < big[0] - 0.5 and ones[-1] < ones[0] - 0.5


def test_slips_of_the_loop_fail_and_are_fixed(deeper):
    assert deeper["long"] == pytest.approx(3, abs=1e-4)
    assert deeper["last"] > 0.1 and deeper["often"] > 0.1
    assert deeper["good"] < 1e-6 and deeper["once"] < 1e-4


def test_adamw_hides_the_missing_division(deeper):
    DEEPER.run("adam-hides adam-hides-run", deeper)
    assert deeper["longer"]["SGD"] == pytest.approx(4, abs=1e-2)
    assert deeper["longer"]["AdamW"] == pytest.approx(1, abs=2e-2)


def test_a_scheduler_inside_the_loop_runs_four_times_too_fast(deeper):
    DEEPER.run("scheduler", deeper)
    rate = deeper["rate_after"]
    assert rate(25, 4) == 0 and rate(25, 1) == pytest.approx(0.75)


def test_trainer_counts_tokens_but_does_not_divide_for_a_bert_classifier(chapter):
    at_once, in_four = (trained(reader(), paragraphs(24), *shape) for shape in ((8, 1), (2, 4)))
    assert at_once == pytest.approx(in_four, abs=1e-3)
    CHAPTER.run("trainer-bert-run", chapter)
    right, factor_too_large, fixed = chapter["classified"].values()
    assert fixed == pytest.approx(right, rel=1e-3)
    # Once transformers divides here, this fails: then the text below the table can go.
    assert factor_too_large[0] == pytest.approx(4 * right[0], rel=1e-3)


def test_accelerate_scales_a_short_window_wrongly(deeper):
    DEEPER.run("accelerate-run accelerate-leftover-run", deeper)
    assert deeper["as_it_is"] == pytest.approx([1, 1, 0.5], abs=1e-4)
    assert deeper["scaled"] == pytest.approx([1, 1, 1], abs=1e-4)


@pytest.mark.parametrize("number, wrong", [(1, 66_955_010 * 8 / 2**20), (3, 4)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    chapter["today"] = dict(attention="sdpa", optimizer="adamw_torch_fused")
    chapter["three"] = ("parameters", "gradients", "optimizer_states")
    before = {1: "distil", 3: "buggy"}[number]
    CHAPTER.run(before, chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


@pytest.mark.parametrize("ratio, word", [(1.14, "holds"), (0.98, "does not hold")])
@pytest.mark.parametrize("estimate", [0.9, 1.1])
def test_b12_is_decided_by_the_published_clock_and_by_no_estimate(ratio, word, estimate):
    """Of 16 times as many micro-batches a step only the ratio's distance from 1 can grow."""

    def simulated(recipe, gpu):
        seconds = SimpleNamespace(expected=estimate if recipe.batch_size == 1 else 1.0)
        return SimpleNamespace(step_time=seconds, peak_allocated=2**30, peak_reserved=2**30)

    names = {"vanilla": Recipe("bert-large"), "simulate": simulated, "left": {"seconds": ratio}}
    assert CHAPTER.verdict("B12", names | {"find_gpu": find_gpu}) == word
