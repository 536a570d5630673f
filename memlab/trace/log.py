"""What happened to memory, told without storage numbers, so that logs can be compared."""

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

# Clipping stacks the norms of all trained weights, whose number is another at each depth, and ranks
# add up their powers: a log has the bytes of one norm, as a negative number, in place of the sum.
NORMS = {
    "aten.stack",
    "aten.pow",
    "_c10d_functional.all_reduce",
    "_c10d_functional.wait_tensor",
}
NORM_BYTES = (2, 4, 8)
UPDATE = -1  # in place of the number of a micro-batch, of what an update does

# What happens, and to which storage: a number, or another name of one that a log does not have.
Event = tuple[object, TraceEvent]


@dataclass(frozen=True)
class Log:
    """The steps of two optimizer steps, of which the second is measured.

    Deaths between two births stand in the order of the births: nobody can tell the difference
    afterwards, and autocast drops its copies in the order of their addresses, another each time.

    weights: how many parameters there are of (so many elements, trainable or not).
    assumptions: those of the run, as `memlab.footprint.Footprint` has them.
    work: what the second step's operators do (`memlab.trace.work.Work`) -> how often.
    """

    steps: list[TraceEvent]
    weights: Counter
    assumptions: tuple[str, ...] = ()
    work: Counter = field(default_factory=Counter)

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        return sum(elements * times for (elements, _), times in self.weights.items())

    @property
    def trainable_parameters(self) -> int:
        """How many of them are trained."""
        return sum(elements * times for (elements, free), times in self.weights.items() if free)

    @classmethod
    def of(
        cls, ledger: Ledger, weights: Counter, numbered: bool = False, work: Iterable = ()
    ) -> Log:
        """The log of a ledger in which a model with these weights was trained.

        numbered: whether modules keep the number of their layer, so that layers differ. work: see
        there.
        """
        marks: dict[int, list[Marker]] = defaultdict(list)
        for at, mark in (ledger.start, Marker.RESET), *ledger.marks:
            marks[at].append(mark)
        steps: list[TraceEvent] = []
        births: dict[int, Alloc] = {}
        living: dict[Alloc, _LiveStorages] = defaultdict(_LiveStorages)
        dying: list[tuple[int, Phase]] = []
        free, learning = trained(weights), False
        replaced = _modules_of_replaced(ledger.entries)

        def bury() -> None:
            for number, phase in sorted(dying):
                birth = births[number]
                steps.append(
                    Free(birth, phase, living[birth].index_of_removed(number, birth, phase))
                )
            dying.clear()

        for at, (storage, change, phase, *_) in enumerate(ledger.entries):
            learning |= phase == Phase.BACKWARD  # before it nothing has gradients to clip
            if dying and (change > 0 or phase != dying[-1][1] or at in marks):
                bury()
            steps += marks.pop(at, ())
            if change > 0:
                module = replaced.get(storage.number, storage.module)
                module = module if numbered else re.sub(r"\.\d+", ".*", module)
                norms = learning and storage.operation in NORMS and storage.module == OUTSIDE
                of_each, rest = divmod(change, free) if norms and free else (0, 0)
                nbytes = -of_each if of_each in NORM_BYTES and not rest else change
                birth = Alloc(
                    nbytes,
                    storage.category,
                    phase,
                    module,
                    storage.operation,
                    stream=storage.stream,
                    item=storage.item,
                    reduction=storage.reduction,
                )
                births[storage.number] = birth
                living[birth].append(storage.number)
                steps.append(birth)
            else:
                dying.append((storage.number, phase))
        bury()
        steps += marks[len(ledger)]
        return cls(steps, weights, tuple(ledger.assumptions), Counter(work))

    def events(self) -> Iterator[Event]:
        """Every step with the number of the birth that it is, or that it ends; None for marks."""
        free = trained(self.weights)
        for number, step in named(self.steps):
            if type(step) is Alloc and step.nbytes < 0:
                step = step._replace(nbytes=-step.nbytes * free)
            yield number, step

    def halves(self) -> tuple[Log, ...]:
        """What is made in the passes, and what in the updates, each with its deaths and its work.

        The one does not depend on the other: a `memlab.trace.trace.Trace` joins halves of two logs.
        """
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
    """Weights made outside any module that others replace -> the modules of these.

    Empty but for adapters of a mixture's experts. PEFT makes these after all others, and casts all
    of them layer by layer; others are replaced in the order in which they were made.
    """
    modules: dict[int, str] = {}
    last = None
    for storage, change, phase, *_ in entries:
        weight = storage.category is Category.PARAMETERS
        if change > 0:
            last = storage if weight else None
        elif last is not None and weight and phase is Phase.FORWARD and storage.module == OUTSIDE:
            modules[storage.number] = last.module
    return modules if any(".experts." in module for module in modules.values()) else {}


def named(steps: Iterable[TraceEvent]) -> Iterator[Event]:
    """Every step with the place of the birth that it is, or that it ends; None for marks."""
    living: dict[Alloc, _LiveStorages] = defaultdict(_LiveStorages)
    for number, step in enumerate(steps):
        if type(step) is Alloc:
            living[step].append(number)
            yield number, step
        elif type(step) is Free:
            yield living[step.birth].remove_freed(step), step
        else:
            yield None, step


def renumbered(events: Iterable[Event]) -> list[TraceEvent]:
    """The steps of a part of a log; a free counts among the storages that live in this part."""
    living: dict[Alloc, _LiveStorages] = defaultdict(_LiveStorages)
    steps: list[TraceEvent] = []
    for number, step in events:
        if type(step) is Alloc:
            living[step].append(number)
        elif type(step) is Free:
            which = living[step.birth].index_of_removed(number, step.birth, step.phase)
            step = step._replace(which=which)
        steps.append(step)
    return steps


class _LiveStorages(list):
    """The numbers of live storages with the same allocation, the oldest first."""

    last = 0  # where the last weight died that was replaced

    def index_of_removed(self, number: object, birth: Alloc, phase: Phase) -> int:
        """Take a number out; its place among them, as `Free.which` counts it."""
        place = self.index(number)
        self.pop(place)
        if _is_replaced(birth, phase):
            which, self.last = place - self.last, place
            return which
        living = len(self) + 1
        undone = phase == Phase.BACKWARD and birth.phase == Phase.FORWARD
        return place - living if undone or place > living - place else place

    def remove_freed(self, death: Free) -> int:
        """Take out the storage that a free means; its number."""
        if not _is_replaced(death.birth, death.phase):
            return self.pop(death.which)
        self.last += death.which
        return self.pop(self.last)


def _is_replaced(birth: Alloc, phase: Phase) -> bool:
    """Whether this frees a weight that is being cast to another dtype, one weight at a time."""
    return birth.category is Category.PARAMETERS and phase is Phase.FORWARD


def trained(weights: Counter) -> int:
    """How many tensors are trained."""
    return sum(times for (_, free), times in weights.items() if free)


def replay(events: Iterable[Event], ledger: Ledger | _PeakOnly) -> None:
    """Let a ledger live through events. Raises what its allocator raises."""
    living: dict[object, Any] = {}
    birth, death = ledger.birth, ledger.death
    for which, step in events:
        if type(step) is Alloc:
            living[which] = birth(*step)
        elif type(step) is Free:
            death(living.pop(which), step.phase)
        elif step is Marker.RESET:
            ledger.reset_peak()
        elif step is Marker.EMPTY_CACHE:
            ledger.empty_cache()


class _PeakOnly:
    """In the place of a `Ledger` where only an allocator's peak is wanted: takes half the time."""

    def __init__(self, allocator: CachingAllocator):
        self.birth = lambda nbytes, category, phase, module, operation, stream, *described: (
            allocator.allocate(nbytes, stream)
        )
        self.death = lambda address, phase: allocator.free(address)
        self.empty_cache, self.reset_peak = allocator.empty_cache, allocator.reset_peak_stats


def peak_reserved(events: Iterable[Event], allocator: CachingAllocator) -> int | None:
    """The most bytes reserved since RESET; None where the allocator runs out of memory."""
    try:
        replay(events, _PeakOnly(allocator))
    except CapacityError:
        return None
    return allocator.peak_reserved


def peak_allocated(events: Iterable[Event]) -> int:
    """The most bytes of blocks since RESET, which no allocator can be below."""
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
