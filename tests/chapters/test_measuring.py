"""The chapter on measuring: its toy tracer is memlab's, and watching changes nothing."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from notebook import Notebook

from memlab import Meter, Recipe
from memlab.workloads.training import Training

DEEPER = Notebook("01-measuring-deeper")


@pytest.fixture(scope="module")
def toy():
    """The class as the chapter shows it."""
    return DEEPER.run("toy", {"torch": torch, "weakref": weakref})["ToyTracer"]


@pytest.mark.parametrize("model", ["bert-large-tiny", "gpt2-tiny"])
def test_the_toy_tracer_equals_memlabs(toy, model):
    training = Training(Recipe(model, batch_size=2, seq_len=64, optimizer="adamw_torch_loop"))
    training.step()
    inputs = list(training.batches[0].values())
    states = [v for s in training.optimizer.state.values() for v in s.values()]
    tracer = toy()
    tracer.alive = {}
    for tensor in [*training.model.parameters(), *training.model.buffers(), *states, *inputs]:
        tracer.see(tensor)
    with tracer:
        training.step()
    with Meter("cpu", training.model, training.optimizer, inputs) as meter:
        training.step()
    assert tracer.peak == meter.footprint.peak_allocated


def test_the_meter_does_not_change_the_losses():
    losses = []
    for watch in (False, True):
        training = Training(Recipe("bert-large-tiny", batch_size=2, seq_len=16))
        for _ in range(2):
            with Meter("cpu", training.model, training.optimizer) if watch else nullcontext():
                losses.append(training.step())
    assert losses[:2] == losses[2:]
