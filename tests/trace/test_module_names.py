"""Whose memory it is: modules in the forward pass, in the backward pass and when recomputed."""

from collections import Counter

import pytest
import torch
from helpers import refused
from torch.utils.checkpoint import checkpoint

from memlab import Recipe, SimulatedGPU, simulate
from memlab.footprint import Footprint
from memlab.trace.tracer import Tracer


class Branches(torch.nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(64, 4096), torch.nn.Linear(4096, 1)
        self.recompute = recompute

    def forward(self, x):
        hidden = checkpoint(self.run, x, use_reentrant=False) if self.recompute else self.run(x)
        return self.narrow(hidden).mean()

    def run(self, x):
        return self.wide(x).relu()


def lives(recompute=False):
    model, x = Branches(recompute), torch.randn(32, 64, requires_grad=True)
    with Tracer() as tracer:
        model(x).backward()
    return tracer.footprint().timeline.lives


def found(lives, operation, category=None):
    return [
        life.module
        for life in lives
        if life.operation == operation and category in (None, life.category)
    ]


def test_a_module_owns_what_its_forward_and_its_backward_make():
    all_of_it = lives()
    assert found(all_of_it, "aten.addmm") == ["wide", "narrow"]
    assert found(all_of_it, "aten.relu") == ["Branches"]
    assert found(all_of_it, "aten.threshold_backward") == ["Branches"]
    # The backward pass runs from the end: narrow's input and weight gradients, then wide's.
    assert found(all_of_it, "aten.mm", "temporary") == ["narrow", "wide"]
    assert found(all_of_it, "aten.mm", "gradients") == ["narrow", "wide"]


def test_what_is_recomputed_belongs_to_the_module_that_runs_again():
    assert found(lives(recompute=True), "aten.addmm") == ["wide", "narrow", "wide"]


def test_a_failing_forward_is_left():
    with Tracer() as tracer:
        with pytest.raises(RuntimeError):
            Branches()(torch.randn(1, 3))
        kept = torch.ones(8)
    assert tracer.storages[-1].module == "outside any module"
    del kept


def bytes_by_module(footprint, depth=None):
    line = footprint.timeline
    totals = Counter({"rounding": line.levels["rounding"][line.peak]})
    for life in line.alive(line.peak):
        workspace = life.category == "workspaces"
        totals[life.category if workspace else ".".join(life.module.split(".")[:depth])] += (
            life.nbytes
        )
    return totals


@pytest.mark.parametrize("checkpointing", ["none", "reentrant"])
def test_layers_share_the_peak_and_sum_to_it(checkpointing):
    recipe = Recipe(
        model="bert-large-tiny",
        batch_size=8,
        seq_len=128,
        optimizer="adamw_torch_fused",  # the multi-tensor step works outside of all modules
        checkpointing=checkpointing,
    )
    footprint = simulate(recipe)
    by_module = bytes_by_module(footprint)
    assert sum(by_module.values()) == footprint.peak_allocated
    assert by_module["workspaces"] == footprint.breakdown["workspaces"]
    assert by_module["rounding"] == footprint.breakdown["rounding"]
    coarse = bytes_by_module(footprint, 1)
    assert sum(coarse.values()) == footprint.peak_allocated
    # Embeddings, layers, pooler; what is left is the head's, the loss's and the inputs'.
    tensors = footprint.peak_tensors
    assert 0.95 * tensors < coarse["bert"] <= tensors
    layers = [
        n for name, n in bytes_by_module(footprint, 4).items() if name.startswith("bert.encoder.la")
    ]
    assert len(layers) == 2


def test_parameters_their_gradients_and_states_belong_to_their_module():
    with SimulatedGPU() as gpu:
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.ones(4, 256, device="cuda")).sum().backward()
        optimizer.step()
        line = gpu.footprint.timeline
    now = line.alive(len(line.phases) - 1)
    for number, layer in (("0", model[0]), ("1", model[1])):
        weights = 4 * sum(parameter.numel() for parameter in layer.parameters())
        held = {category: 0 for category in ("parameters", "gradients", "optimizer_states")}
        for life in now:
            if life.module == number and life.category in held:
                held[life.category] += life.nbytes
        assert held == {
            "parameters": weights,
            "gradients": weights,
            "optimizer_states": 2 * weights,
        }


def test_the_end_of_the_backward_pass_is_no_forward_pass():
    footprint = simulate(Recipe(model="bert-large-tiny", seq_len=16, optimizer="adamw_torch_fused"))
    worst = footprint.worst_of_each_phase()
    assert [phase for phase, *_ in footprint.timeline.spans()][:2] == ["forward", "backward"]
    assert worst["backward"] - worst["forward"] > 3.5 * footprint.parameters  # the gradients


@pytest.mark.parametrize("question", ["by_line", "worst_of_each_phase"])
def test_a_footprint_of_counters_alone_says_that_it_has_no_timeline(question):
    with refused("no timeline"):
        getattr(Footprint(1, 1, {}, "forward"), question)()
