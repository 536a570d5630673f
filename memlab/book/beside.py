"""One table for a recipe: what is predicted, beside what was measured here and elsewhere."""

import os
from typing import Any

import pandas as pd
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

STEPS = 4  # of `measure` with one timed step
TWIN_BATCH = 4  # sequences that a laptop trains in a moment


def beside(recipe: Recipe, gpu: GPU | str = "T4", minutes: float = 2) -> Styler:
    """The peak of a recipe's tensors: predicted at full size, and measured where it can be.

    Rows: on `gpu`, simulated as if it had room; here, at full size where this machine's card has
    room for the recipe and its steps take less than so many minutes, else the model's tiny twin, of
    at most four sequences; each record or published run of the recipe. MiB; error: predicted over
    measured, less one.

    Measured are on a card the allocator's counters, on a CPU the sum of the tensors. Of a
    recipe that cannot be trained on `gpu` the table has no rows, and its caption says why, so that
    a page goes on after a reader's change. Raises ValueError for a card that nobody knows.
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
        guess = simulate_on_cpu(twin)  # whose kernels keep other tensors than a card's
        rows["tiny twin, this CPU"] = guess.peak_tensors, measured.peak_tensors
    else:
        name = torch.cuda.get_device_name()
        rows[f"full size, here ({name})"] = here
    for record in find_records(model=recipe.model, loop=""):
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
    """((predicted, measured) bytes of a real training, or None; why it was not tried)."""
    if not torch.cuda.is_available():
        return None, "No GPU here: the twin is measured"
    card = gpu_of_device(torch.cuda.get_device_name())
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
    # A base that is quantized is made in 16 bits on the host first.
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if recipe.base in QUANTIZED and 2 * predicted.parameters > host / 2:
        return None, "the host has no room for the base in 16 bits: the twin is measured"
    try:
        measured: Footprint = measure(recipe, steps=1).footprint
    except torch.OutOfMemoryError as problem:  # something else is on the card
        return None, str(problem).partition(" GPU 0")[0]
    return (predicted.peak_allocated, measured.peak_allocated), ""
