"""The ledger of a run: every allocation and free, and the footprint that follows from them.

Each entry is served at once by a `CachingAllocator`, if the ledger has one. Peak, breakdown by
category and timeline are computed from the entries on request. Sizes are in bytes.
"""

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
    """One storage: its size, its category, and the module and operation that allocated it.

    address: the address of its block in the allocator while it lives, if there is an allocator.
    line: the line of the user's script that allocated it, if a script is followed. stream: the CUDA
    stream that its memory belongs to, 0 for the default one. item: bytes of one element. reduction:
    for the buffer of a sum along rows, that sum. Two storages are equal only if they are the same.
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
    """A storage is allocated or freed.

    change: its bytes, negative for a free. allocated, reserved: total bytes after the entry.
    """

    storage: Storage
    change: int
    phase: Phase
    allocated: int
    reserved: int


class Ledger:
    """All storages in the order of their allocation, and the entries that allocate and free them.

    allocator: a `CachingAllocator` that serves every entry as it is made, or None to count the
        tensors' own bytes.
    """

    def __init__(self, allocator: CachingAllocator | None = None):
        self.allocator = allocator
        self.assumptions: dict[str, None] = {}  # an ordered set, for `Footprint`
        self.storages: list[Storage] = []
        # Entries are kept as columns. Python's garbage collector would visit tens of thousands of
        # tuples again and again.
        self._numbers: list[int] = []
        self._changes: list[int] = []
        self._phases: list[Phase] = []
        self._served: list[int] = []
        self._reserved: list[int] = []
        self.marks: list[tuple[int, Marker]] = []  # (index of the entry that it precedes, marker)
        self.start = 0  # index of the first entry of the measured part
        self._allocated = 0
        self._before = 0  # bytes that existed before the first entry
        # A tensor is freed by the thread that drops its last reference, such as a thread of gloo,
        # while another allocates.
        self.lock = threading.RLock()

    # ------------------------------------------------------------------ making entries

    def alloc(
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
        """Enter the allocation of a storage of `nbytes` bytes.

        Raises what the allocator raises if the device is full.
        """
        with self.lock:
            address = None if self.allocator is None else self.allocator.allocate(nbytes, stream)
            storage = self._describe(nbytes, category, module, operation)
            storage.address, storage.stream, storage.item = address, stream, item
            storage.reduction = reduction
            self._enter(storage, nbytes, phase)
        return storage

    def existed(
        self, nbytes: int, category: Category, module: str = "", operation: Any = None
    ) -> Storage:
        """Count a storage that existed before the first entry, without an entry."""
        self._before += nbytes
        return self._describe(nbytes, category, module, operation)

    def free(self, storage: Storage, phase: Phase) -> None:
        """Enter the free of a storage."""
        with self.lock:
            if self.allocator is not None and storage.address is not None:
                self.allocator.free(storage.address)
                storage.address = None
            # Frees right after the backward pass belong to it: the last references to its graph
            # are dropped once the engine has returned. The next allocation begins the forward pass.
            if phase == Phase.FORWARD and self._phases and self._phases[-1] == Phase.BACKWARD:
                phase = Phase.BACKWARD
            self._enter(storage, -storage.nbytes, phase)

    @property
    def entries(self) -> list[Entry]:
        """Every allocation and free, in order."""
        owners = (self.storages[number] for number in self._numbers)
        columns = self._changes, self._phases, self._served, self._reserved
        return [Entry(*values) for values in zip(owners, *columns, strict=True)]

    def events(self) -> Iterator[tuple[int | None, TraceEvent]]:
        """(number of the storage, event) of every entry in order, and (None, EMPTY_CACHE) markers.

        Modules are left empty, and each free has `which` 0: the numbers tell the storages apart.
        """
        emptied = Counter(at for at, mark in self.marks if mark is Marker.EMPTY_CACHE)
        allocs = {}
        for at, (storage, change, phase, *_) in enumerate(self.entries):
            yield from [(None, Marker.EMPTY_CACHE)] * emptied[at]
            number = storage.number
            if change > 0:
                described = storage.category, phase, "", storage.operation, storage.stream
                allocs[number] = Alloc(change, *described)
                yield number, allocs[number]
            elif number in allocs:  # not of a storage that existed before the first entry
                yield number, Free(allocs[number], phase, 0)

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._numbers)

    def reset_peak(self) -> None:
        """Start a new measured part, as `torch.cuda.reset_peak_memory_stats` does."""
        self.start = len(self)
        if self.allocator is not None:
            self.allocator.reset_peak_stats()

    def mark(self, mark: Marker) -> None:
        """Note a marker before the next entry."""
        self.marks.append((len(self), mark))

    def empty_cache(self) -> None:
        """Return cached blocks to the device, as `torch.cuda.empty_cache` does."""
        with self.lock:
            self.mark(Marker.EMPTY_CACHE)
            if self.allocator is not None:
                self.allocator.empty_cache()

    def _describe(self, nbytes: int, category: Category, module: str, operation: Any) -> Storage:
        name = operation_name(operation)
        storage = Storage(len(self.storages), nbytes, category, module, name)
        self.storages.append(storage)
        return storage

    def _enter(self, storage: Storage, change: int, phase: Phase) -> None:
        self._allocated += change
        allocated, reserved = self._allocated, 0
        if self.allocator is not None:
            allocated, reserved = self.allocator.allocated, self.allocator.reserved
        self._numbers.append(storage.number)
        self._changes.append(change)
        self._phases.append(phase)
        self._served.append(allocated)
        self._reserved.append(reserved)

    # ------------------------------------------------------------------ reading them

    def peak(self) -> tuple[int, int, Phase, int]:
        """(allocated bytes, reserved bytes, phase, index of the entry) of the peak since the reset.

        Of several equal peaks of allocated bytes, the first. The peak of reserved bytes may be at
        another entry. Index `start - 1` is the state at the reset.
        """
        served = self._since_reset(self._served)
        moment = int(np.argmax(served))  # 0 is the state at the reset
        index = self.start - 1 + moment
        phase = self._phases[index] if moment else Phase.FORWARD
        reserved = max(self._since_reset(self._reserved))
        return served[moment] + self._before, reserved, phase, index

    def _since_reset(self, column: list[int]) -> list[int]:
        """The values of a column, from the state at the reset on."""
        return [column[self.start - 1] if self.start else 0, *column[self.start :]]

    def footprint(self) -> Footprint:
        """The peak since the last `reset_peak`, by category, with its timeline."""
        with self.lock:
            peak, peak_reserved, phase, index = self.peak()
            breakdown = self._breakdown(index)
            # What blocks have in addition to their tensors, so that the parts sum to the peak.
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
        """Bytes by category after the entry `index`, including storages that existed before."""
        breakdown = dict.fromkeys(Category, 0)
        # A storage without an allocation entry was counted by `existed`.
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
        # [moments, categories]: row 0 is the state at the reset, and each row adds one entry.
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
        """Every storage that lived in the measured part, in the order of allocation."""
        # Moment 0 is the state at the reset. What was allocated before it counts from there; what
        # was also freed before it has 0 twice and is left out.
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
    """The name of an operation, such as `aten.mm`; a string is returned unchanged.

    None, for a storage that no operation was seen to make, gives "made before".
    """
    if operation is None:
        return "made before"
    return operation if isinstance(operation, str) else str(operation.overloadpacket)
