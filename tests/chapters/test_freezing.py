"""Chapter 5: its frozen training is the one that memlab runs."""

import pytest
from notebook import assert_steps_agree, cells_of

from memlab import Recipe
from memlab.book import train_step
from memlab.workloads.training import Training

chapter = cells_of("05-freezing", "imports settings vanilla-start reached small-deberta tied")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["bert-large-tiny", "deberta-v3-base-tiny"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_shown_code_and_the_recipe_agree(chapter, model, layers):
    recipe = Recipe(model, batch_size=2, seq_len=32)
    shown = Training(recipe)
    shown.optimizer = chapter["frozen_start"](shown.model, layers)
    library = Training(recipe.but(freeze=("embeddings", layers)))
    parts = shown.model, shown.optimizer, shown.batches[0]
    assert_steps_agree(shown, lambda: train_step(*parts), library)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-3.2-1b-tiny"])
def test_tied_embeddings_bring_backward_down(chapter, name):
    assert all(chapter["head_only"](name, True)) and not any(chapter["head_only"](name, False))
