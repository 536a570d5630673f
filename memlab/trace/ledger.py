"""The ledger of births and deaths, and what can be read from it: peak, breakdown, timeline."""

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memlab.footprint import Allocation, Category, Footprint, Phase, Timeline
from memlab.trace.allocator import CachingAllocator
from memlab.trace.events import Alloc, Free, Marker, TraceEvent
from memlab.trace.reductions import Reduction


@dataclass(slots=True, eq=False)
class Storage:
    """One piece of memory: how large, what for, where and by which operation it was made.

    address: its block in the allocator while it lives, if there is one.
    line: the line of the reader's script that made it, where one is followed. stream: the CUDA
    stream whose memory it is, 0 for the default one. item: bytes of an element. reduction: the sum
    whose buffer it is, if it is one.
    """

    number: int
    nbytes: int
    category: Category
    module: str
    operation: str
    address: int | None = None
    line: str = ""
    stream: int = 0
    item: int = 1
    reduction: Reduction | None = None


class Entry(NamedTuple):
    """A storage is born or dies; allocated and reserved are bytes afterwards."""

    storage: Storage
    change: int
    phase: Phase
    allocated: int
    reserved: int


class Ledger:
    """Storages in the order of birth, and when they came and went.

    allocator: a `CachingAllocator` that serves every birth and death as it happens, or None to
        count the tensors' own bytes.
    """

    def __init__(self, allocator: CachingAllocator | None = None):
        self.allocator = allocator
        self.assumptions: dict[str, None] = {}  # as `memlab.footprint.Footprint` has them, in order
        self.storages: list[Storage] = []
        # The entries by columns: tuples by the ten thousand would keep the garbage collector busy.
        self._numbers: list[int] = []
        self._changes: list[int] = []
        self._phases: list[Phase] = []
        self._served: list[int] = []
        self._reserved: list[int] = []
        self.marks: list[tuple[int, Marker]] = []  # and the entry that each comes before
        self.start = 0  # the entry from which peaks count
        self._allocated = 0
        self._before = 0  # bytes that existed before the first entry
        # A tensor dies in the thread that lets go of it last, which may be one of gloo's.
        self.lock = threading.RLock()

    # ------------------------------------------------------------------ what happens

    def birth(
        self,
        nbytes: int,
        category: Category,
        phase: Phase,
        module: str = "",
        operation: Any = None,
        stream: int = 0,
        item: int = 1,
        reduction: Reduction | None = None,
    ) -> Storage:
        """Enter a new storage of so many bytes."""
        address = None if self.allocator is None else self.allocator.allocate(nbytes, stream)
        storage = self._describe(nbytes, category, module, operation)
        storage.address, storage.stream, storage.item = address, stream, item
        storage.reduction = reduction
        self._enter(storage, nbytes, phase)
        return storage

    def existed(
        self, nbytes: int, category: Category, module: str = "", operation: Any = None
    ) -> Storage:
        """Count a storage that was there before the first entry, and log nothing."""
        self._before += nbytes
        return self._describe(nbytes, category, module, operation)

    def death(self, storage: Storage, phase: Phase) -> None:
        """Enter the end of a storage."""
        if self.allocator is not None and storage.address is not None:
            self.allocator.free(storage.address)
            storage.address = None
        # What dies after the backward pass, its graph, is the end of it; a birth begins a forward.
        if phase == Phase.FORWARD and self._phases and self._phases[-1] == Phase.BACKWARD:
            phase = Phase.BACKWARD
        self._enter(storage, -storage.nbytes, phase)

    @property
    def entries(self) -> list[Entry]:
        """Every birth and death in its order."""
        owners = (self.storages[number] for number in self._numbers)
        columns = self._changes, self._phases, self._served, self._reserved
        return [Entry(*values) for values in zip(owners, *columns, strict=True)]

    def events(self) -> Iterator[tuple[int | None, TraceEvent]]:
        """(number of a storage, what happens to it) in their order, with emptied caches."""
        emptied = Counter(at for at, mark in self.marks if mark is Marker.EMPTY_CACHE)
        births = {}
        for at, (storage, change, phase, *_) in enumerate(self.entries):
            yield from [(None, Marker.EMPTY_CACHE)] * emptied[at]
            number = storage.number
            if change > 0:
                described = storage.category, phase, "", storage.operation, storage.stream
                births[number] = Alloc(change, *described)
                yield number, births[number]
            elif number in births:
                yield number, Free(births[number], phase, 0)

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._numbers)

    def reset_peak(self) -> None:
        """Begin a new measured stretch, as `torch.cuda.reset_peak_memory_stats` does."""
        self.start = len(self)
        if self.allocator is not None:
            self.allocator.reset_peak_stats()

    def mark(self, mark: Marker) -> None:
        """Note what no storage tells."""
        self.marks.append((len(self), mark))

    def empty_cache(self) -> None:
        """Give cached blocks back to the device, as `torch.cuda.empty_cache` does."""
        self.mark(Marker.EMPTY_CACHE)
        if self.allocator is not None:
            self.allocator.empty_cache()

    def _describe(self, nbytes: int, category: Category, module: str, operation: Any) -> Storage:
        name = operation_name(operation)
        storage = Storage(len(self.storages), nbytes, category, module, name)
        self.storages.append(storage)
        return storage

    def _enter(self, storage: Storage, change: int, phase: Phase) -> None:
        with self.lock:
            self._allocated += change
            allocated, reserved = self._allocated, 0
            if self.allocator is not None:
                allocated, reserved = self.allocator.allocated, self.allocator.reserved
            self._numbers.append(storage.number)
            self._changes.append(change)
            self._phases.append(phase)
            self._served.append(allocated)
            self._reserved.append(reserved)

    # ------------------------------------------------------------------ what it tells

    def peak(self) -> tuple[int, int, Phase, int]:
        """(allocated bytes, reserved bytes, phase, number of the entry) since `reset_peak`."""
        served = self._since_reset(self._served)
        moment = int(np.argmax(served))
        index = self.start - 1 + moment
        phase = self._phases[index] if moment else Phase.FORWARD
        reserved = max(self._since_reset(self._reserved))
        return served[moment] + self._before, reserved, phase, index

    def _since_reset(self, column: list[int]) -> list[int]:
        """A column's values, from the state before the measured stretch on."""
        return [column[self.start - 1] if self.start else 0, *column[self.start :]]

    def footprint(self) -> Footprint:
        """The peak since the last `reset_peak`, by category."""
        with self.lock:
            peak, peak_reserved, phase, index = self.peak()
            breakdown = self._breakdown(index)
            if self.allocator is not None:
                breakdown[Category.ROUNDING] = peak - sum(breakdown.values())
            return Footprint(
                peak_allocated=peak,
                peak_reserved=peak_reserved if self.allocator is not None else None,
                breakdown=breakdown,
                peak_phase=phase,
                timeline=self._timeline(index),
            )

    def _breakdown(self, index: int) -> dict[Category, int]:
        """Bytes by category after the entry `index`, with what existed before the first."""
        breakdown = dict.fromkeys(Category, 0)
        entries = zip(self._numbers, self._changes, strict=True)
        born = {number for number, change in entries if change > 0}
        for storage in self.storages:
            if storage.number not in born:
                breakdown[storage.category] += storage.nbytes
        changes = zip(self._numbers[: index + 1], self._changes, strict=False)
        for number, change in changes:
            breakdown[self.storages[number].category] += change
        return breakdown

    def _timeline(self, peak_index: int) -> Timeline:
        columns = {name: i for i, name in enumerate(Category)}
        numbers, phases = self._numbers[self.start :], self._phases[self.start :]
        levels = np.zeros((len(numbers) + 1, len(columns)), np.int64)
        levels[0] = list(self._breakdown(self.start - 1).values())
        categories = [columns[self.storages[number].category] for number in numbers]
        levels[np.arange(1, len(levels)), categories] = self._changes[self.start :]
        levels = levels.cumsum(axis=0)
        if self.allocator is not None:
            served = self._since_reset(self._served)
            levels[:, columns[Category.ROUNDING]] = served - levels.sum(axis=1)
        return Timeline(
            phases[:1] + phases if phases else [Phase.FORWARD],
            dict(zip(columns, levels.T.tolist(), strict=True)),
            self._lives(),
            peak_index - self.start + 1,
        )

    def _lives(self) -> list[Allocation]:
        """Everything that lived from the entry `start` on, in the order of birth."""
        born: dict[int, int] = {}
        died: dict[int, int] = {}
        changes = zip(self._numbers, self._changes, strict=True)
        for moment, (number, change) in enumerate(changes, start=1 - self.start):
            (born if change > 0 else died)[number] = max(0, moment)
        return [
            Allocation(
                storage.nbytes,
                storage.category,
                storage.module,
                storage.operation,
                born.get(storage.number, 0),
                died.get(storage.number),
                storage.line,
            )
            for storage in self.storages
            if died.get(storage.number) != 0
        ]


@functools.cache
def operation_name(operation: Any) -> str:
    """`aten.mm`, in PyTorch's words; a name stays."""
    if operation is None:
        return "made before"
    return operation if isinstance(operation, str) else str(operation.overloadpacket)
