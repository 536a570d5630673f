"""What checkpoints keep waits on the host: which bytes leave the card, and how long they travel."""

import pytest
import torch
from helpers import most
from transformers import modeling_utils

from memlab import Recipe, find_gpu, measure, simulate
from memlab.card.links import host_rate
from memlab.card.step_time import EXPECTED
from memlab.workloads.training import Training

KEPT = Recipe("llama-3.2-1b", batch_size=2, seq_len=512, precision="bf16", attention="sdpa")
KEPT = KEPT.but(checkpointing=True)
AWAY = KEPT.but(activation_offload=True)
INPUT = 2 * 512 * 2048 * 2  # bytes of a layer's input
LAYERS = 16
TINY = Recipe("llama-3-8b-tiny", batch_size=2, seq_len=64, checkpointing=True)


@pytest.fixture(scope="module")
def runs():
    return [simulate(recipe, "RTX-4090") for recipe in (KEPT, AWAY)]


def test_the_inputs_of_layers_leave_the_card(runs):
    kept, away = (most(run, "activations") for run in runs)
    # The last layer's is back, and the one before may be on its way.
    assert LAYERS * INPUT >= kept - away >= (LAYERS - 2) * INPUT
    for name in ("parameters", "gradients", "optimizer_states"):
        assert runs[0].breakdown[name] == runs[1].breakdown[name]


def test_each_input_travels_both_ways_in_the_queue_of_the_kernels(runs):
    kept, away = (run.step_time for run in runs)
    card = find_gpu("RTX-4090")
    travels = away.parts["copies to the host and back"] * host_rate(card)
    assert travels * EXPECTED.link == pytest.approx(2 * LAYERS * INPUT, rel=0.01)
    assert kept.parts["copies to the host and back"] == 0
    assert away.low > kept.low and away.high > kept.high
    assert away.flops == kept.flops


def test_what_leaves_is_what_a_real_run_saves(monkeypatch):
    sizes = []

    def counted(**_):
        def pack(tensor):
            sizes.append(tensor.nbytes)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    recipe = TINY.but(batch_size=8, seq_len=128)
    real = Training(recipe)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_utils, "save_on_cpu", counted)
        real.model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
        real.step()
    card = find_gpu("T4")
    simulated = simulate(away_of(recipe), card).step_time
    travels = simulated.parts["copies to the host and back"] * host_rate(card)
    large = sum(size for size in sizes if size >= 2**16)
    assert travels * EXPECTED.link == pytest.approx(2 * large)


def test_on_a_cpu_all_is_there_already():
    losses = [[Training(one).step() for _ in range(1)] for one in (TINY, away_of(TINY))]
    assert losses[0] == losses[1]
    kept, away = (measure(one, device="cpu", steps=1) for one in (TINY, away_of(TINY)))
    assert kept.footprint.peak_allocated == away.footprint.peak_allocated


def away_of(recipe):
    return recipe.but(activation_offload=True)


def test_the_trainer_is_told():
    arguments = AWAY.training_arguments(use_cpu=True)
    assert arguments.activation_checkpointing_kwargs == {"use_reentrant": False, "offload": True}


def test_without_checkpoints_nothing_is_offloaded_any_more():
    assert not AWAY.but(checkpointing=False).activation_offload
    assert AWAY.but(checkpointing=True).activation_offload
