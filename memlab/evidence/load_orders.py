"""Reserved bytes of published trainings whose 4-bit or 8-bit base was loaded in an unknown order.

`from_pretrained` of the first releases of transformers 5 loaded with four threads, which ran ahead
of the quantization as far as they could; from pull request 44576 on, of March 2026, it waits for
each weight. With threads the order is another each time, and with it what stays reserved. `ways`
draws some orders, between the two ends, no weight ahead and all of them. The ends bound what is
allocated while loading. They need not bound what is reserved later, because more fragments can also
fit better, so a range over the draws is one of orders that were tried and no proof.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memlab.card.load_order import (
    by_name,
    by_weight,
    loaded_by_transformers,
    made,
    peak_reserved,
    quantized,
)
from memlab.footprint import Footprint
from memlab.gpus import GPU
from memlab.predict.simulate import comes_by_weight, full_log, serve
from memlab.spec.recipe import Recipe
from memlab.trace.log import Event, Log

if TYPE_CHECKING:
    from memlab.predict.simulate import Loop

# How often of ten times a loader thread and not the quantization is next, where both could be: 10
# loads everything first. A draw each.
SHARES = (3, 5, 6, 7, 8, 8, 9, 9, 9.5, 9.5, 10)


def simulate_ways(recipe: Recipe, card: GPU, loop: Loop | None = None) -> Footprint:
    """As `memlab.simulate`, with the range of what is reserved where a base could come in `ways`.

    loop: another training loop, as `memlab.predict.simulate.full_log` has it.
    """
    log = full_log(recipe, card, loop)
    found = serve(recipe, log, card)
    if not comes_by_weight(recipe):
        return found
    ends = reserved_range(log, card.usable, card.total_memory, recipe.expandable_segments)
    return replace(found, reserved_range=ends)


def reserved_range(
    log: Log, capacity: int | None, total: int | None, expandable_segments: bool = False
) -> tuple[int, int]:
    """The lowest and the highest peak reserved of a step, in bytes, over the ways of loading.

    log: of a recipe with a quantized base. capacity: bytes that the allocator can have; where a
    way of loading runs out of them, they are its peak. total: the card's bytes. None for both
    means no limit. expandable_segments: as of a recipe.
    """
    peaks = [
        peak_reserved(events, capacity, expandable_segments, total) or capacity
        for events in ways(log, total)
    ]
    return min(peaks), max(peaks)


def ways(log: Log, total: int | None = None) -> Iterator[list[Event]]:
    """The events of a log as it has them, as today's transformers loads, and by `SHARES`."""
    weights, rest = by_weight(log)
    yield [event for _, _, events in weights for event in events] + rest
    yield loaded_by_transformers(log, total)
    warmup, weights, rest = by_name(log, total)
    for seed, share in enumerate(SHARES, 1):
        yield warmup + _by_threads(weights, share, random.Random(seed)) + rest


def _by_threads(weights, share, draw) -> list[Event]:
    """Every weight is made in its first dtype, by whoever is next, and quantized in order."""
    events, ahead, done = [], 0, 0
    while done < len(weights):
        if ahead == done or ahead < len(weights) and draw.random() * 10 < share:
            events += made(*weights[ahead][1:])
            ahead += 1
        else:
            events += quantized(*weights[done][1:])
            done += 1
    return events
