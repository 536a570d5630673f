"""Chapter 4: its loop is the loop that memlab runs, its gradients are the whole batch's."""

import pytest
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, Training

CHAPTER = Notebook("04-accumulation")
LOOPS = "imports settings vanilla-loop accumulated-loop reader gradient-function"
TOKENS = "unequal summed-loss by-tokens bad-fix-code"


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(f"{LOOPS} {TOKENS}")


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

    ours = traced(shown, shown_step)
    assert_same_run(ours, traced(library, library.step))
    if count == 1:
        plain = Training(recipe)

        def vanilla_step():
            return chapter["vanilla_step"](plain.model, plain.optimizer, plain.batches[0])

        assert traced(plain, vanilla_step)[0] == ours[0]


def test_both_sums_by_tokens_have_the_whole_batchs_gradient(chapter):
    for name in ("backward_by_tokens", "backward_at_the_end"):
        model = chapter["small_gpt2"]()
        chapter[name](model, chapter["windows"])
        gradient = chapter["flat_gradient"](model)
        assert chapter["distance"](gradient, chapter["right"]) < 1e-5
