"""What the chapter on measuring shows: contexts, masks, messages and quartiles, by hand."""

import numpy as np
import torch

from memlab import Recipe, gpus, measure, simulate
from memlab.book.chapters import measuring
from memlab.units import MiB

CPU = torch.device("cpu")
MESSAGE = """CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a capacity of 14.56 GiB
of which 9.12 MiB is free. Including non-PyTorch memory, this process has 14.55 GiB memory in use.
Of the allocated memory 14.29 GiB is allocated by PyTorch, and 133.08 MiB is reserved by PyTorch
but unallocated."""


def test_contexts_that_are_assumed_were_seen_by_nobody():
    found = measuring.contexts(CPU)
    assert found["T4"] == gpus.GPUS["T4"].context and not {"A10", "L40S"} & found.keys()
    assert 5 < len(found) < len(gpus.GPUS) and min(found.values()) > 50 * MiB


def test_a_cpu_keeps_the_wider_masks_and_nothing_else():
    recipe = Recipe("bert-large", batch_size=4, optimizer="adamw_torch_loop")
    twin = recipe.twin(batch_size=8)
    here, expected = (run.breakdown["activations"] for run in (measured(twin), simulate(twin)))
    assert here - expected == measuring.wider_masks(twin)


def measured(recipe):
    return measure(recipe, steps=1, device="cpu").footprint


def test_the_six_figures_of_a_message_have_their_meanings():
    frame = measuring.six_figures(MESSAGE)
    assert frame.loc["tried", "figure"] == "32.00 MiB"
    assert frame.loc["process"].tolist() == ["reserved + context", "14.55 GiB"]
    assert frame.loc["unallocated", "figure"] == "133.08 MiB"


def test_a_message_that_never_came_has_no_figures():
    assert measuring.six_figures("").empty


def test_attempts_are_told_apart_whatever_becomes_of_them():
    grows, falls = np.arange(100.0), np.arange(100.0)[::-1]
    passing = np.concatenate([[0, 3, 0], grows, falls, [3, 0, 0], grows / 2, falls / 2, [0]])
    assert measuring._ends_of_attempts(passing) == [201, 402]
