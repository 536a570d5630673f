"""One table per recipe: the prediction next to measurements on this machine and elsewhere."""

from typing import Any

import pandas as pd
import psutil
import torch
from pandas.io.formats.style import Styler

from memlab.book import show
from memlab.evidence.records import find_records
from memlab.footprint import Footprint
from memlab.gpus import GPU, find_gpu, gpu_of_device
from memlab.predict.fit import fits
from memlab.predict.measure import measure
from memlab.predict.on_cpu import simulate_on_cpu
from memlab.predict.simulate import simulate
from memlab.spec.recipe import QUANTIZED, Recipe
from memlab.units import MiB

STEPS = 4  # optimizer steps that `measure` runs for one timed step
TWIN_BATCH = 4  # sequences; a laptop trains that many in a moment


def beside(recipe: Recipe, gpu: GPU | str = "T4", minutes: float = 2) -> Styler:
    """The peak memory of a recipe, predicted at full size and measured as far as possible.

    The rows, in MiB:

    - full size on `gpu`, simulated without a limit;
    - this machine: at full size, if its GPU has room and the steps take less than `minutes`;
      otherwise the model's tiny twin on the CPU, with at most four sequences;
    - each recorded or published run of the same recipe.

    error: predicted / measured - 1. On a GPU, measured bytes come from the allocator's counters; on
    a CPU they are the sum of the live tensors.

    A recipe that cannot be trained on `gpu` gives an empty table, whose caption is the reason. A
    page thus runs on after a reader's edit. Raises ValueError for an unknown GPU.
    """
    card = find_gpu(gpu)
    try:
        return _table(recipe, card, minutes)
    except ValueError as problem:
        return show.table(pd.DataFrame(), str(problem))


def _table(recipe: Recipe, card: GPU, minutes: float) -> Styler:
    predicted = simulate(recipe, card.without_limit())
    rows: dict[str, tuple] = {f"full size, {card.name}": (predicted.peak_allocated, None)}
    here, why_not = _full_size_here(recipe, minutes)
    if here is None:
        twin = recipe.twin(batch_size=min(recipe.batch_size, TWIN_BATCH))
        measured = measure(twin, "cpu", steps=1).footprint
        guess = simulate_on_cpu(twin)  # CPU kernels save other tensors than CUDA kernels
        rows["tiny twin, this CPU"] = guess.peak_tensors, measured.peak_tensors
    else:
        name = torch.cuda.get_device_name()
        rows[f"full size, here ({name})"] = here
    for record in find_records(model=recipe.model, loop=""):
        # `find_records` compares the model only.
        bytes_measured = record.figures.get("peak_allocated_bytes")
        if bytes_measured and Recipe(**record.recipe) == recipe:
            its_card = gpu_of_device(record.device)
            roomy = its_card.without_limit() if its_card else None
            simulated = simulate(recipe, roomy).peak_allocated
            rows[f"{record.kind}, {record.device}"] = simulated, bytes_measured
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["predicted", "measured"])
    frame = frame.astype(float) / MiB
    frame["error"] = show.error(frame["predicted"], frame["measured"])
    caption = f"{recipe.model_name}, {recipe.batch_size} x {recipe.seq_len:,} tokens: MiB"
    return show.table(frame, f"{caption}. {why_not}" if why_not else caption)


def _full_size_here(recipe: Recipe, minutes: float) -> tuple[tuple[int, int] | None, str]:
    """((predicted, measured) bytes at full size on this machine's GPU, or None; why not)."""
    if not torch.cuda.is_available():
        return None, "No GPU here: the twin is measured"
    card = gpu_of_device(torch.cuda.get_device_name())
    # For a GPU that is not in the catalogue: one with the same memory.
    room = card or find_gpu(torch.cuda.get_device_properties(0).total_memory)
    try:
        fit = fits(recipe, room)
    except ValueError as problem:
        return None, str(problem)
    if not fit:
        return None, f"{room.name} has no room for it: the twin is measured"
    predicted: Any = fit.footprint
    time = predicted.step_time
    if time and STEPS * time.expected > 60 * minutes:
        return None, f"{STEPS} steps take longer than {minutes:g} minutes: the twin is measured"
    # A quantized base is initialised in 16 bits on the host. It may fill half of the host's memory.
    host = psutil.virtual_memory().total
    if recipe.base in QUANTIZED and 2 * predicted.parameters > host / 2:
        return None, "the host has no room for the base in 16 bits: the twin is measured"
    try:
        measured: Footprint = measure(recipe, steps=1).footprint
    except torch.OutOfMemoryError as problem:  # another program holds memory on the GPU
        return None, str(problem).partition(" GPU 0")[0]
    return (predicted.peak_allocated, measured.peak_allocated), ""
