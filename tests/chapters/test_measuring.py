"""What the chapter on measuring says of itself: its toy tracer, its verdicts, its wrong answers."""

import weakref

import pytest
import torch
from notebook import Notebook

from memlab import Meter, Recipe, SimulatedGPU, models
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
    names["tqdm"] = lambda steps, leave: steps
    CHAPTER.run("t4-step t4-loop", names)
    assert names["log"] == [
        (16, "trained"),
        (16, "out of memory"),
        (8, "trained"),
    ]
    assert names["message"].startswith("CUDA out of memory. Tried to allocate 32.00 MiB")


def test_every_solution_passes_its_own_check_and_refuses_a_wrong_answer():
    solutions = [cell for cell in CHAPTER.cells if cell.id.endswith("-solution")]
    assert len(solutions) == 4
    for cell in solutions:
        assert "hide-cell" in cell.metadata.tags
        assert "assert check(" in cell.source and "assert not check(" in cell.source


def test_what_a_snapshot_names_is_alive_at_the_peak():
    names = CHAPTER.run("imports imports-memlab mlp mlp-step snapshot snapshot-read")
    moments = {when: sum(size for size, _ in alive) for when, alive in names["moments"].items()}
    with SimulatedGPU("T4"):
        parts = names["build"]("cuda")
        names["train_step"](*parts)
        assert moments["when written"] == torch.cuda.memory_allocated()
        peak = torch.cuda.max_memory_allocated()  # in blocks; the trace has what was asked for
    assert 0 <= peak - moments["at the peak"] < 512 * len(names["moments"]["at the peak"])
    assert moments["at the peak"] > 1.5 * moments["when written"]
