"""Chapter 4: its loop is the loop that memlab runs, its gradients are the whole batch's."""

import pytest
from notebook import assert_steps_agree, cells_of

from memlab import Recipe, Training

LOOPS = "imports settings vanilla-loop accumulated-loop reader gradient-function"
TOKENS = "unequal summed-loss by-tokens bad-fix-code"


chapter = cells_of("04-accumulation", f"{LOOPS} {TOKENS}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["bert-large-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("size, count", [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("optimizer", ["adamw_torch_loop", "adamw_torch", "sgd"])
def test_the_shown_loops_and_the_recipes_loop_agree(chapter, model, size, count, optimizer):
    recipe = Recipe(model, None, size, 32, count, optimizer=optimizer)
    parts = [Training(recipe) for _ in range(3)]
    step, plain_step = chapter["accumulated_step"], chapter["vanilla_step"]
    mine = parts[0].model, parts[0].optimizer
    assert_steps_agree(parts[0], lambda: step(*mine, parts[0].batches), parts[1])
    if count == 1:
        mine = parts[2].model, parts[2].optimizer, parts[2].batches[0]
        assert_steps_agree(parts[2], lambda: plain_step(*mine), Training(recipe))


def test_both_sums_by_tokens_have_the_whole_batchs_gradient(chapter):
    for name in ("backward_by_tokens", "backward_at_the_end"):
        model = chapter["small_gpt2"]()
        chapter[name](model, chapter["windows"])
        gradient = chapter["flat_gradient"](model)
        assert chapter["distance"](gradient, chapter["right"]) < 1e-5
