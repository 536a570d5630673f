"""Chapter 5: its frozen training is the one that memlab runs."""

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, models
from memlab.book import small_config, train_step
from memlab.workloads.training import Training

CHAPTER = Notebook("05-freezing")


@pytest.fixture(scope="module")
def chapter():
    before = torch.get_num_threads()
    yield CHAPTER.run("imports vanilla-start half-freeze")
    torch.set_num_threads(before)  # the chapter takes one


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["bert-large-tiny", "deberta-v3-base-tiny"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_shown_code_and_the_recipe_agree(chapter, model, layers):
    recipe = Recipe(model, batch_size=2, seq_len=32)
    shown = Training(recipe)
    shown.optimizer = chapter["frozen_start"](shown.model, layers)
    library = Training(recipe.but(freeze=("embeddings", layers)))

    def shown_step():
        return train_step(shown.model, shown.optimizer, shown.batches[0])

    assert_same_run(traced(shown, shown_step), traced(library, library.step))
    everything = torch.optim.AdamW(shown.model.parameters(), lr=1e-5)
    train_step(shown.model, everything, shown.batches[0])
    assert len(everything.state) == len(shown.optimizer.state)  # as the text says


def test_what_is_frozen_in_16_bits_and_its_border(chapter):
    model = models.build(small_config("bert-large-tiny", num_hidden_layers=3))
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.tensor([0, 1])}
    whole = model(**batch).loss
    base = model.base_model.requires_grad_(False)
    chapter["halve_frozen"](base, 2, torch.bfloat16)
    assert base.embeddings.word_embeddings.weight.dtype == torch.bfloat16
    dtypes = [next(layer.parameters()).dtype for layer in base.encoder.layer]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    loss = model(**batch).loss
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(whole.item(), abs=0.02)
