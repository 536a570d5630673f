"""Coefficients of a way of training that nobody has asked for yet."""

import pytest

from memlab import Recipe, closed_form, derivation, formula, simulate
from memlab.derivation import derive


def assert_close(recipe, card=None):
    quick, whole = formula(recipe, card), simulate(recipe, card)
    assert quick.peak_allocated == pytest.approx(whole.peak_allocated, rel=0.01)
    assert quick.peak_reserved is quick.device_used is None
    low, high = quick.reserved_range
    assert low == quick.peak_allocated <= high
    assert low <= whole.peak_reserved  # the upper end is no bound
    assert quick.peak_phase == whole.peak_phase
    assert sum(quick.breakdown.values()) == quick.peak_allocated
    for category in ("parameters", "optimizer_states", "activations"):
        there = whole.breakdown[category]
        assert quick.breakdown[category] == pytest.approx(there, rel=1e-3), category
    assert quick.parameters == whole.parameters
    assert quick.trainable_parameters == whole.trainable_parameters


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
