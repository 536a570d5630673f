"""What the chapter on measuring says of itself: its toy tracer, its verdicts, its wrong answers."""

import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from notebook import Notebook

from memlab import Meter, Recipe, SimulatedGPU, models
from memlab.book import show
from memlab.workloads.training import Training

CHAPTER = Notebook("01-measuring")
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


def test_a_t4_runs_out_in_the_second_step_and_goes_on_with_half():
    names = {"torch": torch, "models": models, "SimulatedGPU": SimulatedGPU, "MiB": 2**20}
    CHAPTER.run("t4-step t4-loop", names)
    assert names["log"] == [
        (16, "trained"),
        (16, "out of memory"),
        (8, "trained"),
    ]
    assert names["message"].startswith("CUDA out of memory. Tried to allocate 32.00 MiB")


def test_the_snapshot_has_every_request_of_the_step():
    names = CHAPTER.run("mlp mlp-step", {"Meter": Meter, "SimulatedGPU": SimulatedGPU})
    CHAPTER.run("snapshot", names)
    with open(names["file"], "rb") as dumped:
        kinds = {event["action"] for event in pickle.load(dumped)["device_traces"][0]}
    assert {"alloc", "free_completed", "segment_alloc"} <= kinds


def test_the_perceptron_keeps_the_same_tensors_on_every_device():
    names = CHAPTER.run("mlp mlp-step mlp-simulated", {"device": "cpu"})
    CHAPTER.run("mlp-measured", names)
    assert names["predicted_mlp"] == pytest.approx(names["measured_mlp"], abs=64)


def test_the_meter_does_not_change_the_losses():
    losses = []
    for watch in (False, True):
        training = Training(Recipe("bert-large-tiny", batch_size=2, seq_len=16))
        for _ in range(2):
            with Meter("cpu", training.model, training.optimizer) if watch else nullcontext():
                losses.append(training.step())
    assert losses[:2] == losses[2:]


def test_what_is_forgotten_holds_memory():
    names = CHAPTER.run("gpt trap-outputs trap-sum trap-eval", memlab_names())
    rows = CHAPTER.run("trap-table", names | {"show": show})["rows"]
    kept, late, early, summed, asked, whole, view, best = rows.values()
    assert kept == late > early and summed > asked and whole == view > best


def test_a_notebook_keeps_an_error_until_the_next_one():
    shell = InteractiveShell()
    shell.run_cell("import gc, torch, weakref\nseen = []")
    fails = "def fail():\n    x = torch.ones(9)\n    seen.append(weakref.ref(x))\n    1 / 0\n"
    shell.run_cell(f"{fails}fail()")
    shell.run_cell("gc.collect(); held = seen[0]() is not None")
    assert shell.user_ns["held"]
    shell.run_cell("1 / 0")
    shell.run_cell("gc.collect(); held = seen[0]() is not None")
    assert not shell.user_ns["held"]


def memlab_names():
    return dict(models=models, Meter=Meter, torch=torch, device="cpu", MiB=2**20)
