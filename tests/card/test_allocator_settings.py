"""The settings of PyTorch's allocator inside a simulated GPU."""

import os

import pytest
import torch
from helpers import refused, run_python

from memlab import MiB, Recipe, SimulatedGPU, simulate
from memlab.trace.card_memory import VARIABLES

ON, OFF = "expandable_segments:True", "expandable_segments:False"


@pytest.fixture(autouse=True)
def without_settings(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def reserved(megabytes=30):
    """What a tensor's memory adds to what is reserved, in MiB."""
    before = torch.cuda.memory_reserved()
    tensor = torch.empty(megabytes * MiB, dtype=torch.uint8, device="cuda")
    added = torch.cuda.memory_reserved() - before
    assert tensor.is_cuda
    return added / MiB


@pytest.mark.parametrize("name", VARIABLES)
def test_the_environment_sets_the_allocator(name, monkeypatch):
    monkeypatch.setenv(name, ON)
    with SimulatedGPU("T4") as gpu:
        assert reserved() == 40
        assert torch._C._accelerator_getAllocatorSettings() == ON
    assert gpu.footprint.assumptions == (f"{name}: {ON}, for allocations from then on",)
    with SimulatedGPU("T4") as gpu:
        monkeypatch.setenv(name, OFF)  # until the first allocation
        assert reserved() == 30
        monkeypatch.setenv(name, ON)
        assert reserved(50) == 50
    assert gpu.footprint.assumptions == ()


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="PyTorch 2.11 does not say how its allocator is set",
)
def test_of_both_variables_pytorchs_choice_counts(monkeypatch):
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    here = os.environ | {VARIABLES[0]: ON, VARIABLES[1]: OFF}
    assert run_python(code, env=here).stdout.strip() == ON
    for name in VARIABLES:
        monkeypatch.setenv(name, here[name])
    with SimulatedGPU("T4"):
        assert reserved() == 40


def test_a_program_sets_it_while_it_runs(monkeypatch):
    monkeypatch.setenv(VARIABLES[0], ON)
    with SimulatedGPU("T4"):
        torch._C._accelerator_setAllocatorSettings(OFF)  # after the environment
        assert reserved() == 30
        with pytest.warns(FutureWarning, match="deprecated"):
            torch.cuda.memory._set_allocator_settings(ON)
        assert reserved(45) == 60


def test_what_is_not_simulated_is_named(t4):
    torch._C._accelerator_setAllocatorSettings(
        f"max_split_size_mb: 128, roundup_power2_divisions:[256:1,>:4],{ON}"
    )
    assert reserved() == 40
    assert [line.partition(": ")[2] for line in t4.footprint.assumptions] == [
        "max_split_size_mb is not simulated, the allocator keeps its default",
        "roundup_power2_divisions is not simulated, the allocator keeps its default",
        f"{ON}, for allocations from then on",
    ]


def test_a_value_that_pytorch_refuses_is_refused(monkeypatch):
    allowed = r"expandable_segments:true: allowed are True, False"
    with SimulatedGPU("T4"), refused(allowed):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:true")
    monkeypatch.setenv(VARIABLES[1], "expandable_segments:true")
    with SimulatedGPU("T4"), refused(f"{VARIABLES[1]} has {allowed}"):
        reserved()


def test_a_recipe_says_it_by_itself(monkeypatch):
    recipe = Recipe("gpt2-tiny", batch_size=2, seq_len=64)
    before = simulate(recipe, "T4")
    monkeypatch.setenv(VARIABLES[0], f"{ON},max_split_size_mb:128")
    assert simulate(recipe.but(accumulation=1), "T4") == before


def test_the_snapshot_shows_them(t4):
    torch._C._accelerator_setAllocatorSettings(ON)
    tensors = [torch.empty(30 * MiB, dtype=torch.uint8, device="cuda") for _ in range(3)]
    tensors[1] = None
    torch.cuda.empty_cache()
    snapshot, held = t4.snapshot(), torch.cuda.memory_reserved()
    assert torch.cuda.memory_stats()["segment.all.current"] == 0
    # The gap of 20 MiB without memory parts one segment in two.
    sizes = [segment["total_size"] for segment in snapshot["segments"]]
    assert sizes == [40 * MiB, 40 * MiB] and sum(sizes) == held
    assert all(segment["is_expandable"] for segment in snapshot["segments"])
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions.count("segment_map") == 3 and actions.count("segment_unmap") == 1
