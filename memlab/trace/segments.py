"""The state of the caching allocator: segments cut into blocks, free lists and statistics.

`memlab.trace.allocator` and `memlab.trace.expandable` hold the rules that change this state.
"""

from collections import defaultdict
from typing import NamedTuple

from memlab.trace.allocator_blocks import LARGE_ROUND, Block


class Counter:
    """One statistic: current value, peak, and the sums of all increases and all decreases.

    As `increase_stat` and `decrease_stat` of c10/cuda/CUDACachingAllocator.cpp keep them.
    """

    __slots__ = ("current", "peak", "allocated", "freed")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, change: int) -> None:
        self.current += change
        if change > 0:
            self.allocated += change
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= change

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


POOLS = ("all", "large_pool", "small_pool")
COUNTED = (
    "allocation allocated_bytes requested_bytes segment reserved_bytes inactive_split "
    "inactive_split_bytes"
).split()


class Action(NamedTuple):
    """One action of the allocator, under PyTorch's name for it.

    kind: `alloc` and `free`, with the requested bytes; `segment_alloc` and `segment_free`;
        `segment_map` and `segment_unmap` for expandable segments; and `oom`, which has the bytes
        left on the device in place of an address.
    """

    kind: str
    address: int
    nbytes: int


class Segments:
    """The memory taken from a device. Parameters: see `memlab.trace.allocator.CachingAllocator`."""

    def __init__(
        self,
        capacity: int | None = None,
        statistics: bool = True,
        expandable_segments: bool = False,
        device_memory: int | None = None,
    ):
        self.expandable_segments = expandable_segments
        self._device_memory = device_memory or capacity
        # (stream, small) -> start addresses of blocks without memory, ascending
        self._unmapped: dict[tuple[int, bool], list[int]] = {}
        self.capacity, self.statistics = capacity, statistics
        self.allocated = self.reserved = self.peak_reserved = 0
        self.retries = self.ooms = self.flushes = self.device_allocs = self.device_frees = 0
        self.blocks: dict[int, Block] = {}
        self.trace: list[Action] = []
        # (stream, small) -> the free blocks of a pool, sorted as (size, address)
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
        self._counters = {name: {pool: Counter() for pool in POOLS} for name in COUNTED}
        # Whether small -> statistic -> the two counters that a change moves. A table, because
        # counting is part of the inner loop.
        self._counters_of = {
            small: {
                name: (pools["all"], pools["small_pool" if small else "large_pool"])
                for name, pools in self._counters.items()
            }
            for small in (True, False)
        }
        # On real GPUs, cudaMalloc was seen to return descending addresses. The order matters,
        # because best fit breaks ties by the lower address. The values do not: segments never
        # touch, as `_new_addresses` leaves a gap.
        self._next_segment = 1 << 47

    def _note(self, kind: str, address: int, nbytes: int) -> None:
        if self.statistics:
            self.trace.append(Action(kind, address, nbytes))

    def _count(self, small: bool, name: str, change: int) -> None:
        if not self.statistics:
            return
        for counter in self._counters_of[small][name]:
            counter.add(change)

    def _reserve(self, action: str, small: bool, address: int, nbytes: int) -> None:
        """Take `nbytes` bytes from the device; a negative number returns them."""
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if nbytes > 0:
            self.device_allocs += 1
        else:
            self.device_frees += 1
        self._count(small, "reserved_bytes", nbytes)
        self._note(action, address, abs(nbytes))

    def _new_addresses(self, nbytes: int) -> int:
        self._next_segment -= nbytes + LARGE_ROUND
        return self._next_segment

    def _too_full_for(self, segment: int) -> bool:
        return self.capacity is not None and self.reserved + segment > self.capacity

    def _cut(self, block: Block, size: int) -> Block:
        """Cut a block after `size` bytes; the remainder, which is not in the free list yet."""
        rest = Block(
            block.address + size, block.size - size, block.small, block.segment, block.pool
        )
        rest.before, rest.after = block, block.after
        if block.after:
            block.after.before = rest
        block.size, block.after = size, rest
        self.blocks[rest.address] = rest
        return rest

    def _merge(self, left: Block, right: Block) -> Block:
        left.size, left.after = left.size + right.size, right.after
        if right.after:
            right.after.before = left
        del self.blocks[right.address]
        return left
