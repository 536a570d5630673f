"""The estimate for one of several ranks, beside what is simulated."""

import pytest

from memlab import Recipe, formula, simulate
from memlab.splitting import shared

ALONE = Recipe("gpt2", seq_len=64, precision="bf16-amp", optimizer="adamw_torch_fused",
               attention="sdpa")  # fmt: skip
RATE = 10e9


def estimated(**changes):
    return shared(ALONE.but(**changes), formula(ALONE, "L4"), RATE)


@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_is_near_a_simulation(sharding, accumulation):
    among = {"ranks": 4, "sharding": sharding, "accumulation": accumulation}
    whole, quick = simulate(ALONE.but(**among), "L4"), estimated(**among)
    assert quick.peak_allocated == pytest.approx(whole.peak_allocated, rel=0.3)
    assert quick.step_time.sent == pytest.approx(whole.step_time.sent, rel=0.05)
    assert sum(quick.breakdown.values()) == quick.peak_allocated
    states = quick.breakdown["optimizer_states"]
    assert states == pytest.approx(whole.breakdown["optimizer_states"], rel=0.02)


def test_what_is_sent():
    """A ring sends (n - 1) / n of what is gathered or scattered, and twice that to sum."""
    weights = formula(ALONE).parameters
    assert estimated(ranks=4).step_time.sent == 2 * 4 * weights * 3 // 4
    gathered = estimated(ranks=4, sharding="zero3", accumulation=2).step_time.sent
    assert gathered == (2 * 2 * 2 + 4) * weights * 3 // 4  # reduced once
    assert estimated(ranks=4, sharding="zero2").step_time.sent == (2 + 4) * weights * 3 // 4


def test_one_rank_alone_among_optimizers_is_refused():
    with pytest.raises(ValueError, match="sharding is 'zero1'"):
        estimated(ranks=2, sharding="zero1")
