"""What several tests ask in the same words."""

import dataclasses

import pytest

from memlab import Recipe, formula, simulate
from memlab.evidence.accuracy import Comparison
from memlab.evidence.records import Record

TINY = Recipe(model="gpt2-tiny", batch_size=1, seq_len=16)


def one_line(error) -> str:
    """The text of a caught error, which must be one line."""
    text = str(error.value)
    assert "\n" not in text
    return text


TWO = TINY.but(batch_size=2, seq_len=32)


def a_run(figures, device="Tesla T4", kind="recorded", recipe=TWO) -> Record:
    """A record of a small recipe."""
    plain = {"model": recipe.model, "batch_size": recipe.batch_size, "seq_len": recipe.seq_len}
    return Record(kind, "one", plain, figures, device, None, {}, "2026-11-21", "a test")


def a_comparison(predicted, recorded, **changes) -> Comparison:
    """One figure of a decoder's run on an L4."""
    one = Comparison("NVIDIA L4", "one", "decoder", "full", "x", "reserved", predicted, recorded)
    return dataclasses.replace(one, **changes)


def assert_close(recipe, card=None):
    """The closed form says of a recipe what the simulation says."""
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
