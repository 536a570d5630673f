"""What the allocator holds once a 4-bit or 8-bit base is loaded: that depends on who loads it.

Each weight comes to the card in its first dtype, is quantized there, and leaves its block behind
for the next. What stays reserved follows from the order of these events:

- a built model is moved to the card, weight by weight in the order of its modules, as
  `memlab.measure` does, and any loop inside a `SimulatedGPU` that moves one;
- transformers' `from_pretrained` first takes and frees one block as large as the quantized model
  (`caching_allocator_warmup` in modeling_utils.py), then loads weight by weight in the order of
  their names (`convert_and_load_state_dict_in_model` in core_model_loading.py).

A log has the first, and `memlab.simulate` takes the second. The first releases of transformers 5
loaded by threads, in another order each time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memlab.footprint import Category, Phase
from memlab.trace.allocator import MIN_BLOCK, CachingAllocator, CapacityError
from memlab.trace.events import Alloc, Free, Marker, WeightLoaded
from memlab.trace.log import Event, Log
from memlab.units import round_up

if TYPE_CHECKING:
    from memlab.card.tracer import CardTracer

Weight = tuple[str, int, list[Event]]  # name, copies, events
LEFT_FREE = int(1.2 * 2**30)  # what the warm-up leaves of a card: caching_allocator_warmup


def loaded_weights(tracer: CardTracer, training) -> list[tuple[int, WeightLoaded]]:
    """(number of the entry, step) for every weight of a base that has come to the card.

    What comes between two weights, a module's buffers, has a step without a name.
    """
    from transformers.pytorch_utils import Conv1D

    found, seen = [], set()  # of tied weights the first counts
    for path, module in training.model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            entries = getattr(parameter, "_memlab_loaded", None)
            # Made after the base: adapters, and the trained copy of a head.
            adapter = ".lora_" in path or ".modules_to_save." in path
            if entries is None or adapter or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = re.sub(
                r"^base_model\.model\.|\.(base_layer|original_module)(?=\.)", "", f"{path}.{name}"
            )
            transposed = getattr(module, "source_cls", None) is Conv1D and name == "weight"
            fp16 = training.recipe.compute_dtype == "fp16"
            int8 = hasattr(parameter, "SCB") and fp16  # else it is converted
            one_of_many = re.sub(r"\.\d+\.", ".*.", full, count=1)
            found.append((*entries, WeightLoaded(one_of_many, int(int8 or transposed))))
    marks, last = [], 0
    for start, end, step in sorted(found, key=lambda entry: entry[:2]):
        if start > last:
            marks.append((start, WeightLoaded("", 0)))
        marks.append((end, step))
        last = end
    return marks


def loaded_by_transformers(log: Log, total: int | None = None) -> list[Event]:
    """The events of a log in the order of today's `from_pretrained`.

    total: as for `by_name`.
    """
    warmup, weights, rest = by_name(log, total)
    for _, copies, events in weights:
        warmup += made(copies, events) + quantized(copies, events)
    return warmup + rest


def by_name(log: Log, total: int | None) -> tuple[list[Event], list[Weight], list[Event]]:
    """The block of the warm-up, the weights in the order of their names, and all other events.

    total: the card's bytes, of which the warm-up leaves some; None means no limit.
    """
    from transformers.core_model_loading import dot_natural_key

    weights, rest = by_weight(log)
    warmup = sum(bytes_to_hold(events) for _, _, events in weights)
    if total is not None:
        warmup = min(warmup, total - LEFT_FREE)
    weights.sort(key=lambda weight: dot_natural_key(weight[0]))
    return _block("warm-up", warmup) if warmup > 0 else [], weights, rest


def peak_reserved(
    events: Iterable[Event],
    capacity: int | None = None,
    expandable_segments: bool = False,
    total: int | None = None,
) -> int | None:
    """The peak reserved since RESET; None where the allocator runs out of memory.

    total: the card's bytes, as for `CachingAllocator`.
    """
    allocator = CachingAllocator(capacity, False, expandable_segments, total)
    addresses, peak = {}, 0
    try:
        for which, step in events:
            if type(step) is Alloc:
                addresses[which] = allocator.allocate(step.nbytes, step.stream)
                peak = max(peak, allocator.reserved)
            elif type(step) is Free:
                allocator.free(addresses.pop(which))
            elif step is Marker.RESET:
                peak = allocator.reserved
            elif step is Marker.EMPTY_CACHE:
                allocator.empty_cache()
    except CapacityError:
        return None
    return peak


def peak_allocated(events: Iterable[Event]) -> int:
    """The most bytes of blocks since RESET, which no allocator can be below."""
    living, now, peak = {}, 0, 0
    for which, step in events:
        if type(step) is Alloc:
            living[which] = block = round_up(step.nbytes, MIN_BLOCK)
            now += block
            peak = max(peak, now)
        elif type(step) is Free:
            now -= living.pop(which)
        elif step is Marker.RESET:
            peak = now
    return peak


def by_weight(log: Log) -> tuple[list[Weight], list[Event]]:
    """The weights in the order of a log, and all other events."""
    weights, events, others, layers = [], [], [], Counter()
    for number, step in log.events():
        if type(step) is not WeightLoaded:
            events.append((number, step))
            continue
        if step.name:
            weights.append((step.name.replace("*", str(layers[step.name])), step.copies, events))
            layers[step.name] += 1
        else:
            others += events
        events = []
    return weights, others + events


def made(copies: int, events: list[Event]) -> list[Event]:
    """A weight as the file has it. Where it is copied to be quantized, that is one more."""
    number, birth = events[0]
    return [(("file", number), birth)] if copies else events[:1]


def quantized(copies: int, events: list[Event]) -> list[Event]:
    """What follows; a weight that is not quantized is there already."""
    if not copies:
        return events[1:]
    number, birth = events[0]
    return [*events, (("file", number), Free(birth, birth.phase, 0))]


def _block(name, nbytes) -> list[Event]:
    """One block that is taken and given back."""
    birth = Alloc(nbytes, Category.TEMPORARY, Phase.FORWARD, "", None)
    return [(name, birth), (name, Free(birth, birth.phase, 0))]


def bytes_to_hold(events) -> int:
    """What the warm-up reckons for a weight: without its scales, or as it is if it stays so."""
    gone = {which for which, step in events if type(step) is Free}
    return max(s.nbytes for which, s in events if type(s) is Alloc and which not in gone)
