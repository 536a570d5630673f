"""Allocation logs of two optimizer steps: made from a ledger, split, compared and replayed.

A `Log` holds events without storage numbers (`memlab.trace.events`), so the logs of different runs
can be compared. `named` gives the events their storages again, and `replay` passes them to a ledger
or an allocator.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memlab.footprint import Category, Phase
from memlab.trace.allocator import MIN_BLOCK, CachingAllocator, CapacityError
from memlab.trace.events import OUTSIDE, Alloc, Free, Marker, TraceEvent
from memlab.trace.ledger import Ledger
from memlab.units import round_up

# Gradient clipping stacks the norms of all trained weights, and several ranks add up powers of the
# norms. Such a tensor grows with the number of weights, which differs at each depth. So a log has
# the bytes of a single norm instead, as a negative number: -4 for fp32.
NORMS = {
    "aten.stack",
    "aten.pow",
    "_c10d_functional.all_reduce",
    "_c10d_functional.wait_tensor",
}
NORM_BYTES = (2, 4, 8)
UPDATE = -1  # as `Work.micro_batch`: the work of clipping and of the optimizer step

# (name of the storage, event): any hashable name, such as a number; None for markers.
Event = tuple[object, TraceEvent]


@dataclass(frozen=True)
class Log:
    """The events of two optimizer steps; the second one is measured.

    Frees between two allocations are sorted by the order in which their storages were allocated.
    Their own order has no effect on memory, and it varies between runs: autocast drops its cached
    copies in the order of their addresses.

    steps: the events. weights: (elements, trainable) -> number of parameters.
    assumptions: those of the run, as in `memlab.footprint.Footprint`.
    work: work of an operator in the second step (`memlab.trace.work.Work`) -> how often.
    """

    steps: list[TraceEvent]
    weights: Counter
    assumptions: tuple[str, ...] = ()
    work: Counter = field(default_factory=Counter)

    @property
    def parameters(self) -> int:
        """Number of weights of the model, in elements."""
        return sum(elements * times for (elements, _), times in self.weights.items())

    @property
    def trainable_parameters(self) -> int:
        """Number of weights that are trained, in elements."""
        return sum(elements * times for (elements, free), times in self.weights.items() if free)

    @classmethod
    def of(
        cls, ledger: Ledger, weights: Counter, numbered: bool = False, work: Iterable = ()
    ) -> Log:
        """The log of a ledger in which a model with these weights was trained.

        weights, work: as in the class. numbered: whether module names keep the numbers of layers.
        Without them, equal events of different layers are equal.
        """
        marks: dict[int, list[Marker]] = defaultdict(list)
        for at, mark in (ledger.start, Marker.RESET), *ledger.marks:
            marks[at].append(mark)
        steps: list[TraceEvent] = []
        allocs: dict[int, Alloc] = {}
        living: dict[Alloc, _LiveStorages] = defaultdict(_LiveStorages)
        freed: list[tuple[int, Phase]] = []
        free, learning = trained(weights), False
        replaced = _modules_of_replaced(ledger.entries)

        def write_frees() -> None:
            # Write the frees that have been collected, in the order of their allocations.
            for number, phase in sorted(freed):
                alloc = allocs[number]
                steps.append(
                    Free(alloc, phase, living[alloc].index_of_removed(number, alloc, phase))
                )
            freed.clear()

        for at, (storage, change, phase, *_) in enumerate(ledger.entries):
            # Before the first backward pass there are no gradients to clip. A tensor that has the
            # size of all norms by chance, such as rotary frequencies, is something else.
            learning |= phase == Phase.BACKWARD
            # Frees are collected up to the next allocation, marker or change of phase.
            if freed and (change > 0 or phase != freed[-1][1] or at in marks):
                write_frees()
            steps += marks.pop(at, ())
            if change > 0:
                module = replaced.get(storage.number, storage.module)
                module = module if numbered else re.sub(r"\.\d+", ".*", module)
                norms = learning and storage.operation in NORMS and storage.module == OUTSIDE
                # Norms of `free` trained weights: bytes of each, and no remainder.
                of_each, rest = divmod(change, free) if norms and free else (0, 0)
                nbytes = -of_each if of_each in NORM_BYTES and not rest else change
                alloc = Alloc(
                    nbytes,
                    storage.category,
                    phase,
                    module,
                    storage.operation,
                    stream=storage.stream,
                    item=storage.item,
                    reduction=storage.reduction,
                )
                allocs[storage.number] = alloc
                living[alloc].append(storage.number)
                steps.append(alloc)
            else:
                freed.append((storage.number, phase))
        write_frees()
        steps += marks[len(ledger)]
        return cls(steps, weights, tuple(ledger.assumptions), Counter(work))

    def events(self) -> Iterator[Event]:
        """Every event, with the name of the storage that it allocates or frees; None for markers.

        Norms have the bytes of all trained weights again.
        """
        free = trained(self.weights)
        for number, step in named(self.steps):
            if type(step) is Alloc and step.nbytes < 0:
                step = step._replace(nbytes=-step.nbytes * free)
            yield number, step

    def halves(self) -> tuple[Log, ...]:
        """Split the log in two: forward and backward passes, and optimizer steps.

        Each half has the frees of its storages, and its work. Neither depends on the other, so
        `memlab.trace.trace.Trace` can join halves of two logs.
        """
        # A storage belongs to the half that allocates it, wherever it is freed. The markers UPDATE
        # and UPDATED go to both halves, to say where they are joined.
        halves: tuple[list[Event], ...] = ([], [])
        updated: set[object] = set()
        inside = False
        for number, step in named(self.steps):
            if step in (Marker.UPDATE, Marker.UPDATED):
                inside = step is Marker.UPDATE
                for half in halves:
                    half.append((None, step))
                continue
            if type(step) is Alloc and inside:
                updated.add(number)
            halves[number in updated].append((number, step))
        work: tuple[Counter, ...] = Counter(), Counter()
        for operator, times in self.work.items():
            work[operator.micro_batch == UPDATE][operator] = times
        return tuple(
            Log(renumbered(half), self.weights, self.assumptions, done)
            for half, done in zip(halves, work, strict=True)
        )


def _modules_of_replaced(entries: Iterable[tuple]) -> dict[int, str]:
    """Numbers of weights allocated outside any module -> the module of the weight replacing each.

    Only for the LoRA adapters of a mixture's experts, otherwise empty. PEFT adds these after all
    other adapters (`_inject_parameters` in peft/tuners/tuners_utils.py). It then casts all adapters
    layer by layer (`cast_adapter_dtype`), so they are not replaced in the order of allocation. All
    other weights are, so their order identifies them.
    """
    modules: dict[int, str] = {}
    last = None
    for storage, change, phase, *_ in entries:
        weight = storage.category is Category.PARAMETERS
        # A cast allocates the new weight, then frees the old one, with nothing allocated between.
        if change > 0:
            last = storage if weight else None
        elif last is not None and weight and phase is Phase.FORWARD and storage.module == OUTSIDE:
            modules[storage.number] = last.module
    return modules if any(".experts." in module for module in modules.values()) else {}


def named(steps: Iterable[TraceEvent]) -> Iterator[Event]:
    """Every event, named by the index of the event that allocates its storage; None for markers."""
    living: dict[Alloc, _LiveStorages] = defaultdict(_LiveStorages)
    for number, step in enumerate(steps):
        if type(step) is Alloc:
            living[step].append(number)
            yield number, step
        elif type(step) is Free:
            yield living[step.alloc].remove_freed(step), step
        else:
            yield None, step


def renumbered(events: Iterable[Event]) -> list[TraceEvent]:
    """The events of a part of a log, each `Free.which` counted among the storages of this part."""
    living: dict[Alloc, _LiveStorages] = defaultdict(_LiveStorages)
    steps: list[TraceEvent] = []
    for number, step in events:
        if type(step) is Alloc:
            living[step].append(number)
        elif type(step) is Free:
            which = living[step.alloc].index_of_removed(number, step.alloc, step.phase)
            step = step._replace(which=which)
        steps.append(step)
    return steps


class _LiveStorages(list):
    """The names of the live storages with equal allocations, the oldest first."""

    last = 0  # index at which the last replaced weight was freed

    def index_of_removed(self, number: object, alloc: Alloc, phase: Phase) -> int:
        """Remove a storage; its index among them, as `Free.which` counts it."""
        place = self.index(number)
        self.pop(place)
        if _is_replaced(alloc, phase):
            which, self.last = place - self.last, place
            return which
        # The backward pass frees activations in reverse: counted from the youngest, their index is
        # the same for every layer and at every depth.
        living = len(self) + 1
        undone = phase == Phase.BACKWARD and alloc.phase == Phase.FORWARD
        return place - living if undone or place > living - place else place

    def remove_freed(self, free: Free) -> int:
        """Remove the storage that an event frees; its name. The inverse of `index_of_removed`."""
        if not _is_replaced(free.alloc, free.phase):
            return self.pop(free.which)
        self.last += free.which
        return self.pop(self.last)


def _is_replaced(alloc: Alloc, phase: Phase) -> bool:
    """Whether this frees a weight that is being cast to another dtype, one weight at a time."""
    return alloc.category is Category.PARAMETERS and phase is Phase.FORWARD


def trained(weights: Counter) -> int:
    """Number of tensors that are trained."""
    return sum(times for (_, free), times in weights.items() if free)


def replay(events: Iterable[Event], ledger: Ledger | _PeakOnly) -> None:
    """Make the entries of a ledger from events. Raises what its allocator raises."""
    living: dict[object, Any] = {}
    alloc, free = ledger.alloc, ledger.free
    for which, step in events:
        if type(step) is Alloc:
            living[which] = alloc(*step)
        elif type(step) is Free:
            free(living.pop(which), step.phase)
        elif step is Marker.RESET:
            ledger.reset_peak()
        elif step is Marker.EMPTY_CACHE:
            ledger.empty_cache()


class _PeakOnly:
    """Replaces a `Ledger` if only an allocator's peak is wanted; halves the time of a replay."""

    def __init__(self, allocator: CachingAllocator):
        self.alloc = lambda nbytes, category, phase, module, operation, stream, *described: (
            allocator.allocate(nbytes, stream)
        )
        self.free = lambda address, phase: allocator.free(address)
        self.empty_cache, self.reset_peak = allocator.empty_cache, allocator.reset_peak_stats


def peak_reserved(events: Iterable[Event], allocator: CachingAllocator) -> int | None:
    """The peak of reserved bytes since RESET; None if the allocator runs out of memory."""
    try:
        replay(events, _PeakOnly(allocator))
    except CapacityError:
        return None
    return allocator.peak_reserved


def peak_allocated(events: Iterable[Event]) -> int:
    """The peak since RESET of requested bytes, each rounded up to a multiple of 512.

    A lower bound for any allocator: it leaves out the remainder of blocks that are not split.
    """
    blocks: dict[object, int] = {}
    now = peak = 0
    for which, step in events:
        if type(step) is Alloc:
            blocks[which] = round_up(step.nbytes, MIN_BLOCK)
            now += blocks[which]
            peak = max(peak, now)
        elif type(step) is Free:
            now -= blocks.pop(which)
        elif step is Marker.RESET:
            peak = now
    return peak
