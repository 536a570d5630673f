"""What PyTorch's caching allocator keeps: its segments, cut into blocks, and its statistics."""

from collections import defaultdict
from typing import NamedTuple

from memlab.trace.allocator_blocks import LARGE_ROUND, Block


class Counter:
    """One of the allocator's statistics: its value now, its highest, all that came and went."""

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
    """What the allocator did, by PyTorch's names.

    kind: `alloc` and `free` with the bytes that were requested, `segment_alloc` and
        `segment_free`, of expandable segments `segment_map` and `segment_unmap`, and `oom` with
        the bytes left on the device in the place of an address.
    """

    kind: str
    address: int
    nbytes: int


class Segments:
    """The memory that is taken from a device, as of `memlab.trace.allocator.CachingAllocator`."""

    def __init__(
        self,
        capacity: int | None = None,
        statistics: bool = True,
        expandable_segments: bool = False,
        device_memory: int | None = None,
    ):
        self.expandable_segments = expandable_segments
        self._device_memory = device_memory or capacity
        # (stream, small) -> the addresses of blocks without memory, ascending
        self._unmapped: dict[tuple[int, bool], list[int]] = {}
        self.capacity, self.statistics = capacity, statistics
        self.allocated = self.reserved = self.peak_reserved = 0
        self.retries = self.ooms = self.flushes = self.device_allocs = self.device_frees = 0
        self.blocks: dict[int, Block] = {}
        self.trace: list[Action] = []
        # (stream, small) -> the free blocks of a pool, as (size, address)
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
        self._counters = {name: {pool: Counter() for pool in POOLS} for name in COUNTED}
        self._counters_of = {  # by small: the counters that a change of a statistic moves
            small: {
                name: (pools["all"], pools["small_pool" if small else "large_pool"])
                for name, pools in self._counters.items()
            }
            for small in (True, False)
        }
        # cudaMalloc was seen to hand out descending addresses, and best fit breaks ties by the
        # lower one; segments never touch, so only their order matters.
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
        """Take so many bytes from the device, or give them back, where the number is negative."""
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
        """Cut a block behind so many bytes: the rest, which is in no pool's cache yet."""
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
