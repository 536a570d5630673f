"""Chapter 4: its loop is the loop that memlab runs, its gradients are the whole batch's."""

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, Training
from memlab.book.chapters.accumulation import (
    distance,
    flat_gradient,
    paragraphs,
    reader,
    split,
)

CHAPTER = Notebook("04-accumulation")
TINY = "imports vanilla-loop accumulated-loop gradient-function summed-loss by-tokens bad-fix-code"


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(TINY, {"flat_gradient": flat_gradient})


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
    padded = paragraphs(16)
    right = chapter["gradient"](reader(), [padded])
    for name in ("backward_by_tokens", "backward_at_the_end"):
        model = reader()
        chapter[name](model, split(padded, 4))
        assert distance(flat_gradient(model), right) < 1e-5
