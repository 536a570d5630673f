"""Whether the record of another person's GPU can be right: `memlab record --check FILE`.

The figures of one run depend on each other. PyTorch's allocator hands out multiples of 512 bytes
and reserves multiples of 2 MiB. What is allocated is at most what is reserved, and so on up to the
GPU's total memory. Throughput is the batch over the time of a step. A figure that was mistyped, or
taken from another run, therefore shows.
"""

import datetime
import itertools
from dataclasses import replace
from typing import Any

from memlab.evidence.records import Record
from memlab.gpus import gpu_of_device
from memlab.libraries import first_line
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.trace.allocator_blocks import LARGE_ROUND, MIN_BLOCK
from memlab.units import mib

# Share by which a total may differ: drivers and clouds differ by up to 1 %, and some GPUs come in
# two sizes.
TOTALS = 0.03
PREDICTED = 0.05  # share by which a prediction of allocated bytes may miss before it is a doubt
NEEDED = ("torch", "transformers", "memlab", "cuda")  # versions that a record must have
# Figure -> the bytes of which it is a multiple. Each figure is at most the next.
SIZES = {
    "peak_allocated": MIN_BLOCK,
    "peak_reserved": LARGE_ROUND,
    "device_used": 1,
    "total_memory": 1,
}
QUARTILES = "step_lower_quartile_seconds", "step_seconds", "step_upper_quartile_seconds"


def doubts(run: Record) -> list[str]:
    """What cannot be right about a run recorded on a GPU, one line each; empty if nothing is.

    Nothing is simulated here.
    """
    card = gpu_of_device(run.device)
    if card is None:
        return [f"{run.device!r} is not a card that memlab knows: add it to gpus.json first"]
    total, usual = run.figures.get("total_memory_bytes", 0), card.total_memory or 0
    plain = {f"versions has no {name}": name not in run.versions for name in NEEDED}
    plain |= {
        f"kind is {run.kind!r}: a card's own record is 'recorded'": run.kind != "recorded",
        "driver is null: nvidia-smi shows it": run.driver is None,
        f"date is {run.date}, which is in the future": run.date > datetime.date.today().isoformat(),
        f"total_memory is {mib(total)}, {card.name} has {mib(usual)}": abs(total / usual - 1)
        > TOTALS,
    }
    problems = [text for text, holds in plain.items() if holds]
    if run.figures.get("out_of_memory"):
        return problems
    return [*problems, *_sizes(run.figures), *_seconds(run)]


def against_prediction(runs: list[Record]) -> list[str]:
    """Lines on runs whose allocated bytes are far from the simulation, or that are too fast.

    Too fast is less than half the lower end of the estimated seconds.
    """
    problems = []
    for run in runs:
        card = gpu_of_device(run.device)
        if card is None or run.figures.get("out_of_memory"):
            continue
        # The machine's own total: drivers and clouds leave different amounts.
        card = replace(card, total_memory=run.figures["total_memory_bytes"])
        try:
            predicted = simulate(Recipe(**run.recipe), card)
        except (TypeError, ValueError, RuntimeError) as error:
            problems.append(f"{run.name}: the simulation refuses it: {first_line(error)}")
            continue
        allocated, seconds = run.figures["peak_allocated_bytes"], run.figures["step_seconds"]
        if abs(predicted.peak_allocated / allocated - 1) > PREDICTED:
            sizes = f"{mib(allocated)}, the simulation gives {mib(predicted.peak_allocated)}"
            problems.append(f"{run.name}: peak allocated is {sizes}")
        time = predicted.step_time
        if time and seconds < time.low / 2:
            about = f"{seconds:g} s, the estimate is at least {time.low:.3g} s"
            problems.append(f"{run.name}: a step takes {about}")
    return problems


def _sizes(figures: dict[str, Any]) -> list[str]:
    problems = [f"figures has no {name}_bytes" for name in SIZES if f"{name}_bytes" not in figures]
    if problems:
        return problems
    sizes = {name: figures[f"{name}_bytes"] for name in SIZES}
    # The context is what the GPU uses beyond the reserved bytes, so all the rest was reserved.
    context = figures.get("context_bytes", 0)
    if sizes["device_used"] - context > sizes["peak_reserved"]:
        problems.append(f"device_used is more than peak_reserved plus a context of {mib(context)}")
    problems += [
        f"{name} is {size:,}, which is not a multiple of {SIZES[name]:,}"
        for name, size in sizes.items()
        if size % SIZES[name]
    ]
    return problems + [
        f"{less} is {mib(sizes[less])}, more than {more} with {mib(sizes[more])}"
        for less, more in itertools.pairwise(sizes)
        if sizes[less] > sizes[more]
    ]


def _seconds(run: Record) -> list[str]:
    quartiles = [run.figures.get(name, 0) for name in QUARTILES]
    if quartiles != sorted(quartiles) or not quartiles[0]:
        return [f"{', '.join(QUARTILES)} are {quartiles}: allowed are three in rising order"]
    speed, median = run.figures.get("samples_per_second", 0), quartiles[1]
    samples = run.recipe.get("batch_size", 1) * run.recipe.get("accumulation", 1)
    # `measure` computes the throughput from the median step, so only rounding may differ.
    if abs(speed * median / samples - 1) > 0.01:
        return [f"samples_per_second is {speed:g}, which is not {samples} in {median:g} s"]
    return []
