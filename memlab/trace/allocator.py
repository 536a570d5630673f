"""PyTorch's CUDA caching allocator, in Python: from requests to reserved memory.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings (no
`max_split_size_mb`, no garbage collection threshold), or with `expandable_segments:True`, for which
`memlab.trace.expandable` has them. A block belongs to the stream that it was made on, and serves no
other. Everything is in bytes.
"""

from bisect import bisect_left, insort

from memlab.trace.allocator_blocks import (
    LARGE_ROUND,
    MEDIUM_REQUEST,
    MEDIUM_SEGMENT,
    MIN_BLOCK,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    Block,
    take,
)
from memlab.trace.expandable import ExpandableSegments
from memlab.trace.segments import Counter


class CapacityError(Exception):
    """A segment that the device cannot give, even after the cache was emptied."""

    def __init__(self, segment: int):
        super().__init__(f"no room for a segment of {segment} bytes")
        self.segment = segment


class CachingAllocator(ExpandableSegments):
    """Serves requests from cached blocks first and asks the device for segments otherwise.

    capacity: bytes that the device can give in all; None means no limit.
    expandable_segments: whether segments grow where they are (`memlab.trace.expandable`).
    device_memory: bytes of the device, from which their addresses follow; None takes the capacity.

    `allocated` counts the blocks in use, `reserved` the memory taken from the device; both in
    bytes, as `torch.cuda.memory_allocated()` and `memory_reserved()` report them; `peak_reserved`
    is the highest since `reset_peak_stats`.

    statistics: whether `stats` and `trace` are kept, which takes half the time.
    trace: every `Action` in its order.
    """

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """Reserve a block for `nbytes` bytes on a stream (0 is the default one): its address.

        Raises CapacityError when the device is full: it empties the cache once, as PyTorch
        does, and asks again. `num_alloc_retries` counts that, whether it helped or not.
        """
        size = max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)
        small = size <= SMALL_REQUEST
        free = self._free[stream, small]
        best = bisect_left(free, (size, 0))
        if self._unmapped:
            best = self._expandable_fit(free, best)
        if best < len(free):
            block = self.blocks[free.pop(best)[1]]
        else:
            block = self._new_block(size, small, stream)
        was_split, rest = self.statistics and block.is_split, block.size - size
        fine = small or self.expandable_segments
        splits = rest >= MIN_BLOCK if fine else rest > SMALL_REQUEST
        if splits:
            other = self._cut(block, size)
            insort(other.pool, (rest, other.address))
        block.free, block.requested = False, nbytes
        self.allocated += block.size
        if self.statistics:  # asked once: this runs by the million
            nbytes_more = splits * rest - was_split * (size + rest)
            self._count_inactive(block, splits - was_split, nbytes_more)
            self._count_request(block, 1)
            self._note("alloc", block.address, nbytes)
        return block.address

    def free(self, address: int) -> None:
        """Give a block back to the cache and merge it with free neighbours."""
        block = self.blocks[address]
        self.allocated -= block.size
        if self.statistics:
            self._count_request(block, -1)
            self._note("free", address, block.requested)
        block.free, block.requested = True, 0
        number, nbytes = 0, 0  # of the free neighbours
        before, after = block.before, block.after
        if before is not None and before.free:
            number, nbytes = 1, before.size
            take(before)
            block = self._merge(before, block)
        if after is not None and after.free:
            number, nbytes = number + 1, nbytes + after.size
            take(after)
            block = self._merge(block, after)
        if self.statistics:
            split = block.is_split
            self._count_inactive(block, split - number, split * block.size - nbytes)
        insort(block.pool, (block.size, block.address))

    def empty_cache(self) -> None:
        """Return every wholly free segment to the device, and granules of expandable ones."""
        self.flushes += 1
        for stream, small in sorted(self._free, key=lambda pool: pool[::-1]):
            free, remaining = self._free[stream, small], []
            for size, address in free:
                if size == self.blocks[address].segment:
                    self._count(small, "segment", -1)
                    self._reserve("segment_free", small, address, -size)
                    del self.blocks[address]
                else:
                    remaining.append((size, address))
            free[:] = remaining
            if self._unmapped:
                for block in [self.blocks[address] for _, address in remaining]:
                    if block.is_expandable:
                        self._unmap(block)

    # ------------------------------------------------------------------ what it can tell

    def stats(self) -> dict:
        """The statistics that `torch.cuda.memory_stats_as_nested_dict()` gives, by its names.

        A block is active as long as it is allocated. There is no limit above
        which blocks are oversize, PyTorch's default (-1).
        """
        stats = {
            name: {pool: counter.as_dict() for pool, counter in pools.items()}
            for name, pools in self._counters.items()
        }
        for active, name in (("active", "allocation"), ("active_bytes", "allocated_bytes")):
            stats[active] = {pool: dict(values) for pool, values in stats[name].items()}
        never = Counter().as_dict()
        return stats | {
            "oversize_allocations": never,
            "oversize_segments": dict(never),
            "max_split_size": -1,
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
            "num_sync_all_streams": self.flushes,
            "num_device_alloc": self.device_allocs,
            "num_device_free": self.device_frees,
        }

    def reset_peak_stats(self) -> None:
        """Let every peak begin anew, at the value of now."""
        self.peak_reserved = self.reserved
        for pools in self._counters.values():
            for counter in pools.values():
                counter.peak = counter.current

    def reset_accumulated_stats(self) -> None:
        """Let every sum of `stats` begin anew, at 0."""
        for pools in self._counters.values():
            for counter in pools.values():
                counter.allocated = counter.freed = 0
        self.retries = self.ooms = self.flushes = self.device_allocs = self.device_frees = 0

    def _count_inactive(self, block: Block, number: int, nbytes: int) -> None:
        """Free pieces of segments that other pieces are in use of; PyTorch leaves out expandable
        ones, which can give back parts of themselves.
        """
        if not block.is_expandable:
            self._count(block.small, "inactive_split", number)
            self._count(block.small, "inactive_split_bytes", nbytes)

    def _count_request(self, block: Block, sign: int) -> None:
        self._count(block.small, "allocation", sign)
        self._count(block.small, "allocated_bytes", sign * block.size)
        self._count(block.small, "requested_bytes", sign * block.requested)

    # ------------------------------------------------------------------ blocks and segments

    def _new_block(self, size: int, small: bool, stream: int) -> Block:
        """A block of new memory, for which an empty cache makes room where it must."""
        if small:
            segment = SMALL_SEGMENT
        elif size < MEDIUM_REQUEST:
            segment = MEDIUM_SEGMENT
        else:
            segment = -(-size // LARGE_ROUND) * LARGE_ROUND
        block = self._from_device(size, segment, small, stream)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._from_device(size, segment, small, stream)
        if block is None:
            self.ooms += 1
            self._note("oom", (self.capacity or 0) - self.reserved, size)
            raise CapacityError(segment)
        return block

    def _from_device(self, size: int, segment: int, small: bool, stream: int) -> Block | None:
        """A block of new memory, or None where the device is full."""
        if self.expandable_segments:
            return self._expand(size, small, stream)
        if self._too_full_for(segment):
            return None
        address = self._new_addresses(segment)
        block = Block(address, segment, small, segment, self._free[stream, small])
        self.blocks[address] = block
        self._count(small, "segment", 1)
        self._reserve("segment_alloc", small, address, segment)
        return block
