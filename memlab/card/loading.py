"""What the allocator holds once a 4-bit or 8-bit base is loaded: that depends on who loads it.

Each weight comes to the card in its first dtype, is quantized there, and leaves its block behind
for the next. What stays reserved follows from the order of these events, and there are several:

- a built model is moved to the card, weight by weight in the order of its modules, as
  `memlab.measure` does;
- transformers' `from_pretrained` first takes and frees one block as large as the quantized model
  (`caching_allocator_warmup` in modeling_utils.py), then loads weight by weight in the order of
  their names (`convert_and_load_state_dict_in_model` in core_model_loading.py);
- `from_pretrained` of the first releases of transformers 5 loaded with four threads, which ran
  ahead of the quantization as far as they could; from pull request 44576 on, of March 2026, it
  waits for each weight.

The first two are certain. With threads the order is another each time: `ways` draws some, between
its two ends, no weight ahead and all of them. The ends bound what is allocated while loading. They
need not bound what is reserved later, because fragments are no monotonous matter, so a range over
the draws is one of orders that were tried and no proof.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from transformers.core_model_loading import dot_natural_key

from memlab.trace.allocator import CachingAllocator, CapacityError
from memlab.trace.depth import EMPTY_CACHE, RESET, Log

# How often of ten times a loader thread and not the quantization is next, where both could be: 0 is
# one by one, as today, 10 loads everything first. A draw each.
SHARES = (0, 3, 5, 6, 7, 8, 8, 9, 9, 9.5, 9.5, 10)
LEFT_FREE = int(1.2 * 2**30)  # what the warm-up leaves of a card: caching_allocator_warmup

# An event is ("birth", number, bytes), ("death", number, bytes), RESET or EMPTY_CACHE.


def reserved_range(log: Log, capacity: int | None, total: int | None) -> tuple[int, int]:
    """The lowest and the highest peak reserved of a step, in bytes, over the ways of loading.

    log: of a recipe with a quantized base. capacity: bytes that the allocator can have; where a
    way of loading runs out of them, they are its peak. total: the card's bytes. None for both
    means no limit.
    """
    peaks = [peak_reserved(events, capacity) or capacity for events in ways(log, total)]
    return min(peaks), max(peaks)


def ways(log: Log, total: int | None = None) -> Iterator[list[tuple]]:
    """The events of a log for each way of loading: first its own, then those of `SHARES`."""
    weights, rest = _by_weight(log)
    yield [event for _, _, events in weights for event in events] + rest
    warmup = sum(_bytes_to_hold(events) for _, _, events in weights)
    if total is not None:
        warmup = min(warmup, total - LEFT_FREE)
    weights.sort(key=lambda weight: dot_natural_key(weight[0]))
    for seed, share in enumerate(SHARES):
        block = [("birth", "warm-up", warmup), ("death", "warm-up", warmup)] if warmup > 0 else []
        yield block + _from_pretrained(weights, share, random.Random(seed)) + rest


def peak_reserved(events: list[tuple], capacity: int | None = None) -> int | None:
    """The peak reserved since RESET; None where the allocator runs out of memory."""
    allocator, addresses, peak = _WithoutStatistics(capacity), {}, 0
    try:
        for event in events:
            if event[0] == "birth":
                addresses[event[1]] = allocator.allocate(event[2])
                peak = max(peak, allocator.reserved)
            elif event[0] == "death":
                allocator.free(addresses.pop(event[1]))
            elif event is RESET:
                peak = allocator.reserved
            elif event is EMPTY_CACHE:
                allocator.empty_cache()
    except CapacityError:
        return None
    return peak


class _WithoutStatistics(CachingAllocator):
    def _count(self, small, name, change):
        """They take half the time, and nobody asks."""

    def _count_request(self, block, sign):
        pass


def _by_weight(log: Log) -> tuple[list[tuple], list[tuple]]:
    """[(name, copies, events) of each weight], the events after the last weight."""
    weights, events, living, layers = [], [], defaultdict(list), defaultdict(int)
    for number, step in enumerate(log.steps):
        if step[0] == "birth":
            living[step].append(number)
            events.append(("birth", number, step[1]))
        elif step[0] == "death":
            events.append(("death", living[step[1]].pop(step[3]), step[1][1]))
        elif step[0] == "weight":
            _, name, copies = step
            weights.append((name.replace("*", str(layers[name])), copies, events))
            layers[name] += 1
            events = []
        else:
            events.append(step)
    return weights, events


def _from_pretrained(weights, share, draw) -> list[tuple]:
    """Every weight is made in its first dtype, by whoever is next, and quantized in order."""
    events, made, done = [], 0, 0
    while done < len(weights):
        if made == done or made < len(weights) and draw.random() * 10 < share:
            events += _made(*weights[made][1:])
            made += 1
        else:
            events += _quantized(*weights[done][1:])
            done += 1
    return events


def _made(copies, events) -> list[tuple]:
    """A weight as the file has it. Where it is copied to be quantized, that is one more."""
    (_, number, nbytes), *_ = events
    return [("birth", ("file", number), nbytes)] if copies else events[:1]


def _quantized(copies, events) -> list[tuple]:
    """What follows; a weight that is not quantized is there already."""
    if not copies:
        return events[1:]
    _, number, nbytes = events[0]
    return [*events, ("death", ("file", number), nbytes)]


def _bytes_to_hold(events) -> int:
    """What the warm-up reckons for a weight: without its scales, or as it is if it stays so."""
    gone = {number for kind, number, _ in events if kind == "death"}
    return max(nbytes for kind, number, nbytes in events if kind == "birth" and number not in gone)
