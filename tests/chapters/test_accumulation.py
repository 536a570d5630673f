"""Chapter 4: its loop is the loop that memlab runs, its gradients are the whole batch's."""

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, Training

CHAPTER = Notebook("04-accumulation")
LOOPS = "imports settings vanilla-loop accumulated-loop reader gradient-function"
TOKENS = "unequal summed-loss by-tokens bad-fix-code"


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(f"{LOOPS} {TOKENS} learn-function")


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


def test_both_sums_by_tokens_have_the_whole_batchs_gradient(chapter):
    for name in ("backward_by_tokens", "backward_at_the_end"):
        model = chapter["small_gpt2"]()
        chapter[name](model, chapter["windows"])
        gradient = chapter["flat_gradient"](model)
        assert chapter["distance"](gradient, chapter["right"]) < 1e-5


def test_a_way_steps_on_its_windows_and_the_held_out_blocks_are_not_among_them(
    chapter, monkeypatch
):
    windows, read = [], set()
    unseen = {tuple(row) for row in chapter["unseen"].tolist()}

    def step(model, optimizer, window):
        windows.append([len(part["input_ids"]) for part in window])
        read.update(tuple(row) for part in window for row in part["input_ids"].tolist())

    monkeypatch.setitem(chapter["learn"].__globals__, "accumulated_step", step)
    losses = chapter["learn"](4, 4, 1e-3, 0.9, 0)
    assert windows == [[4] * 4] * 9 and not read & unseen
    assert len(losses) == 4 and len(set(losses)) == 1  # this step trains nothing
