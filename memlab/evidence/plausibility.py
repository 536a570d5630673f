"""Whether a record of somebody else's card can be what it says: `memlab record --check FILE`.

The figures of one run hang together: PyTorch's allocator hands out blocks of 512 bytes and takes
segments of 2 MiB, the card's parts lie one in the other, and throughput is the batch over the
step's time. So a figure that was mistyped, or taken from another run, shows.
"""

import datetime
import itertools
from dataclasses import replace

from memlab.evidence.records import Record
from memlab.gpus import gpu_of_device
from memlab.libraries import first_line
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.trace.allocator_blocks import LARGE_ROUND, MIN_BLOCK
from memlab.units import mib

TOTALS = 0.03  # drivers and clouds differ by up to 1 %, and some cards have two sizes
PREDICTED = 0.05  # what a prediction of allocated bytes may miss, before somebody should look
NEEDED = ("torch", "transformers", "memlab", "cuda")


def doubts(run: Record) -> list[str]:
    """What cannot be right about a run recorded on a GPU, a line each; empty if nothing."""
    found = [f"versions has no {name}" for name in NEEDED if name not in run.versions]
    card = gpu_of_device(run.device)
    if card is None:
        return [*found, f"{run.device!r} is no card that memlab knows: add it to gpus.json first"]
    if run.kind != "recorded":
        found.append(f"kind is {run.kind!r}: a card's own record is 'recorded'")
    if run.driver is None:
        found.append("driver is null: nvidia-smi says which it is")
    if run.date > datetime.date.today().isoformat():
        found.append(f"date is {run.date}, which is to come")
    total = run.figures.get("total_memory_bytes")
    if total is None:
        found.append("figures has no total_memory_bytes")
    elif abs(total / card.total_memory - 1) > TOTALS:
        found.append(f"total_memory is {mib(total)}, {card.name} has {mib(card.total_memory)}")
    if run.figures.get("out_of_memory"):
        return found
    return [*found, *_disordered(run), *_not_of_the_allocator(run), *_seconds(run)]


def against_prediction(runs: list[Record]) -> list[str]:
    """The runs whose allocated bytes are far from the simulation's, or that are too quick."""
    found = []
    for run in runs:
        card = gpu_of_device(run.device)
        if card is None or run.figures.get("out_of_memory"):
            continue
        card = replace(card, total_memory=run.figures["total_memory_bytes"])
        try:
            predicted = simulate(Recipe(**run.recipe), card)
        except (TypeError, ValueError, RuntimeError) as problem:
            found.append(f"{run.name}: the simulation refuses it: {first_line(problem)}")
            continue
        allocated, seconds = run.figures["peak_allocated_bytes"], run.figures["step_seconds"]
        if abs(predicted.peak_allocated / allocated - 1) > PREDICTED:
            sizes = f"{mib(allocated)}, simulated are {mib(predicted.peak_allocated)}"
            found.append(f"{run.name}: peak allocated is {sizes}")
        time = predicted.step_time
        if time and seconds < time.low / 2:
            about = f"{seconds:g} s, at least {time.low:.3g} s are estimated"
            found.append(f"{run.name}: a step takes {about}")
    return found


def _disordered(run: Record) -> list[str]:
    """Each figure is at most the next, as the parts of a card lie one in the other."""
    names = ("peak_allocated", "peak_reserved", "device_used", "total_memory")
    known = {name: run.figures.get(f"{name}_bytes") for name in names}
    sizes = [(name, size) for name, size in known.items() if size is not None]
    found = [f"figures has no {name}_bytes" for name, size in known.items() if size is None]
    if found:
        return found
    context = run.figures.get("context_bytes", 0)
    _, reserved, used, _ = (size for _, size in sizes)
    if used - context > reserved:
        found.append(f"device_used is more than peak_reserved and a context of {mib(context)}")
    return found + [
        f"{less} is {mib(size)}, more than {more} with {mib(most)}"
        for (less, size), (more, most) in itertools.pairwise(sizes)
        if size > most
    ]


def _not_of_the_allocator(run: Record) -> list[str]:
    units = {"peak_allocated_bytes": MIN_BLOCK, "peak_reserved_bytes": LARGE_ROUND}
    return [
        f"{name} is {run.figures[name]:,}, which is no multiple of {unit:,}"
        for name, unit in units.items()
        if run.figures.get(name, 0) % unit
    ]


def _seconds(run: Record) -> list[str]:
    names = "step_lower_quartile_seconds", "step_seconds", "step_upper_quartile_seconds"
    known = [run.figures.get(name) for name in names]
    given = [seconds for seconds in known if seconds is not None]
    if known != sorted(given) or not given[0]:
        return [f"{', '.join(names)} are {known}: wanted are three, each at most the next"]
    speed = run.figures.get("samples_per_second", 0)
    samples = run.recipe.get("batch_size", 1) * run.recipe.get("accumulation", 1)
    if abs(speed * given[1] / samples - 1) > 0.01:
        return [f"samples_per_second is {speed:g}, {samples} in {given[1]:g} s are not that"]
    return []
