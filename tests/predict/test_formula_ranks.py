"""The formula of one of several ranks, beside what is simulated."""

import json

import numpy as np
import pytest
import torch
from helpers import of_the_recipe
from torch.distributed.optim import ZeroRedundancyOptimizer

from memlab import Recipe, SimulatedGPU, formula, simulate
from memlab.predict.formula_ranks import ERRORS, first_share

ALONE = Recipe("gpt2", seq_len=64, precision="bf16-amp", optimizer="adamw_torch_fused",
               attention="sdpa")  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_formula_is_near_a_simulation(sharding, accumulation):
    recipe = ALONE.but(ranks=8, sharding=sharding, accumulation=accumulation)
    whole, quick = simulate(recipe, "L4", link="pcie"), formula(recipe, "L4", link="pcie")
    assert quick.peak_allocated == pytest.approx(whole.peak_allocated, rel=0.06)
    assert quick.step_time.sent == pytest.approx(whole.step_time.sent, rel=0.01)
    assert quick.step_time.expected == pytest.approx(whole.step_time.expected, rel=0.15)
    assert sum(quick.breakdown.values()) == quick.peak_allocated
    for name in ("parameters", "optimizer_states"):
        assert quick.breakdown[name] == pytest.approx(whole.breakdown[name], rel=0.01)


def test_a_slower_link_makes_a_longer_step():
    recipe = ALONE.but(ranks=8, sharding="zero3")
    fast, slow = (formula(recipe, "A100-80GB", link) for link in ("nvlink", "ethernet-10"))
    assert slow.peak_allocated == fast.peak_allocated
    assert slow.step_time.parts["communication"] > fast.step_time.parts["communication"]
    assert slow.step_time.sent == fast.step_time.sent


def test_zero1_gives_the_first_rank_what_pytorch_gives_it():
    sizes = [50, 7, 7, 3, 30, 20, 1]
    with SimulatedGPU("T4", ranks=3):
        torch.distributed.init_process_group("nccl")
        weights = [torch.nn.Parameter(torch.zeros(size, device="cuda")) for size in sizes]
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.1).optim
        held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    kinds, numbers = np.unique(sizes, return_counts=True)
    assert first_share(kinds, numbers, 3) == held / sum(sizes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_rank": 8, "base": "nf4"}, "base is 'nf4' and sharding is 'zero3'"),
        ({"model": "t5-3b"}, "ddp and zero1 for two stacks of layers"),
    ],
)
def test_what_the_formula_does_not_know_it_names(changes, words):
    with pytest.raises(ValueError, match=words):
        formula(ALONE.but(ranks=2, sharding="zero3", **changes), "L4")


def test_an_unknown_link_is_refused():
    with pytest.raises(ValueError, match="link is 'nvlink': allowed are for L4 pcie"):
        formula(ALONE.but(ranks=2), "L4", link="nvlink")


def test_the_errors_that_are_told_are_of_every_way_to_share():
    told = json.loads(ERRORS.read_text())
    assert set(told) == {"ddp", "zero1", "zero2", "zero3"}
    assert all(0 <= one["median"] <= one["worst"] and one["recipes"] >= 10 for one in told.values())
    (said,) = of_the_recipe(formula(ALONE.but(ranks=2, sharding="zero3"), "L4").assumptions)
    assert f"{told['zero3']['median']:.1%} in the median" in said
    assert not of_the_recipe(formula(ALONE, "L4").assumptions)
