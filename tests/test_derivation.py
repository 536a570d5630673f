"""Coefficients of a way of training that nobody has asked for yet."""

import pytest
from helpers import assert_close

from memlab import Recipe, closed_form, derivation, formula
from memlab.derivation import derive


def test_it_derives_what_it_does_not_know(monkeypatch):
    recipe = Recipe(
        "gpt2-medium", batch_size=2, seq_len=256, lora_rank=4, optimizer="sgd", accumulation=3
    )
    known = {}
    for module in (closed_form, derivation):
        monkeypatch.setattr(module, "coefficients", lambda: known)
    with pytest.raises(ValueError, match="derive") as error:
        formula(recipe)
    assert "\n" not in str(error.value)
    derive(recipe)
    assert_close(recipe, "T4")
    assert_close(recipe.but(seq_len=64, batch_size=8, lora_rank=16))
