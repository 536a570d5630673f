"""PyTorch's CUDA caching allocator in Python: from requested bytes to reserved memory.

The code follows `DeviceCachingAllocator` in `c10/cuda/CUDACachingAllocator.cpp` with its default
settings: no `max_split_size_mb` and no garbage collection threshold. Comments name the function
that they reproduce. `memlab.trace.expandable` has the rules of `expandable_segments:True`. A block
serves only requests of the stream on which it was allocated. All sizes and addresses are in bytes.

Known limitations: a freed block is reusable at once, so `record_stream` has no effect. There are no
private pools, which CUDA graphs use.
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
    """The device has no room for a segment, even after the cache was emptied."""

    def __init__(self, segment: int):
        super().__init__(f"no room for a segment of {segment} bytes")
        self.segment = segment


class CachingAllocator(ExpandableSegments):
    """Serves requests from cached blocks, and asks the device for a segment if no block fits.

    capacity: bytes that the device can provide in total; None means no limit.
    expandable_segments: whether new segments can grow in place (`memlab.trace.expandable`).
    device_memory: bytes of the whole device, which set the length of an expandable segment's
        address range; None takes the capacity.
    statistics: whether `stats` and `trace` are kept, which takes about half of the time.
    trace: every `Action`, in order.

    `allocated` is the sum of the blocks in use, and `reserved` the memory taken from the device.
    Both are in bytes, as `torch.cuda.memory_allocated()` and `memory_reserved()` report them.
    `peak_reserved` is the maximum of `reserved` since `reset_peak_stats`.
    """

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """Allocate a block for `nbytes` bytes on a stream (0 is the default one); its address.

        Raises CapacityError if the device is full. Like PyTorch, the allocator first empties its
        cache and asks the device once more. `num_alloc_retries` counts these retries, successful
        or not.
        """
        size = max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)  # round_size
        small = size <= SMALL_REQUEST  # get_pool
        free = self._free[stream, small]
        # get_free_block: the smallest block that fits, and of equal ones that with the lowest
        # address (BlockComparatorSize).
        best = bisect_left(free, (size, 0))
        if self._unmapped:
            best = self._expandable_fit(free, best)
        if best < len(free):
            block = self.blocks[free.pop(best)[1]]
        else:
            block = self._new_block(size, small, stream)
        # `_cut` changes `is_split`, and the statistics need its old value.
        was_split, rest = self.statistics and block.is_split, block.size - size
        # should_split: large blocks are cut only if more than 1 MiB remains. Otherwise the request
        # keeps the whole block, and its allocated bytes exceed the requested ones.
        fine = small or self.expandable_segments
        splits = rest >= MIN_BLOCK if fine else rest > SMALL_REQUEST
        if splits:
            other = self._cut(block, size)
            insort(other.pool, (rest, other.address))
        block.free, block.requested = False, nbytes
        self.allocated += block.size
        if self.statistics:  # a single check, because a replay comes here millions of times
            # alloc_found_block: the block leaves the free pieces of its segment, and what was cut
            # off joins them. A segment that was wholly free had no such piece.
            nbytes_more = splits * rest - was_split * (size + rest)
            self._count_inactive(block, splits - was_split, nbytes_more)
            self._count_request(block, 1)
            self._note("alloc", block.address, nbytes)
        return block.address

    def free(self, address: int) -> None:
        """Return a block to the cache and merge it with free neighbours."""
        block = self.blocks[address]
        self.allocated -= block.size
        if self.statistics:
            self._count_request(block, -1)
            self._note("free", address, block.requested)
        block.free, block.requested = True, 0
        number, nbytes = 0, 0  # of the free neighbours that the block absorbs
        before, after = block.before, block.after
        # free_block, try_merge_blocks. Blocks without memory never merge with a mapped one:
        # `_map` and `_unmap` keep their `free` False.
        if before is not None and before.free:
            number, nbytes = 1, before.size
            take(before)
            block = self._merge(before, block)
        if after is not None and after.free:
            number, nbytes = number + 1, nbytes + after.size
            take(after)
            block = self._merge(block, after)
        if self.statistics:
            split = block.is_split  # a segment that is wholly free now is no inactive split
            self._count_inactive(block, split - number, split * block.size - nbytes)
        insort(block.pool, (block.size, block.address))

    def empty_cache(self) -> None:
        """Return wholly free segments to the device, and whole granules of expandable segments."""
        self.flushes += 1
        # release_cached_blocks: large pools come before small ones, each by stream and size.
        for stream, small in sorted(self._free, key=lambda pool: pool[::-1]):
            free, remaining = self._free[stream, small], []
            for size, address in free:
                # The block fills its segment. An expandable block never does: its `segment` is an
                # AddressRange, not a size.
                if size == self.blocks[address].segment:
                    self._count(small, "segment", -1)
                    self._reserve("segment_free", small, address, -size)
                    del self.blocks[address]
                else:
                    remaining.append((size, address))
            free[:] = remaining
            if self._unmapped:
                # release_blocks: collect the blocks first, because unmapping changes the pool.
                for block in [self.blocks[address] for _, address in remaining]:
                    if block.is_expandable:
                        self._unmap(block)

    # ------------------------------------------------------------------ statistics

    def stats(self) -> dict:
        """The statistics of `torch.cuda.memory_stats_as_nested_dict()`, under the same names.

        A block is active exactly while it is allocated. No block is oversize, because
        `max_split_size` has PyTorch's default of no limit (-1).
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
        """Set every peak to its current value."""
        self.peak_reserved = self.reserved
        for pools in self._counters.values():
            for counter in pools.values():
                counter.peak = counter.current

    def reset_accumulated_stats(self) -> None:
        """Set every accumulated sum of `stats` to 0."""
        for pools in self._counters.values():
            for counter in pools.values():
                counter.allocated = counter.freed = 0
        self.retries = self.ooms = self.flushes = self.device_allocs = self.device_frees = 0

    def _count_inactive(self, block: Block, number: int, nbytes: int) -> None:
        """Count free pieces of segments that are partly in use.

        As in `free_block`, expandable segments do not count: they can return free granules.
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
        """Get a block of new device memory; if the device is full, empty the cache and retry."""
        # get_allocation_size
        if small:
            segment = SMALL_SEGMENT
        elif size < MEDIUM_REQUEST:
            segment = MEDIUM_SEGMENT
        else:
            segment = -(-size // LARGE_ROUND) * LARGE_ROUND
        # malloc: alloc_block, release_cached_blocks, alloc_block again. The step between them,
        # release_available_cached_blocks, does nothing without max_split_size.
        block = self._from_device(size, segment, small, stream)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._from_device(size, segment, small, stream)
        if block is None:
            self.ooms += 1
            self._note("oom", (self.capacity or 0) - self.reserved, size)
            # PyTorch's message has this size for expandable segments, too, which map granules.
            raise CapacityError(segment)
        return block

    def _from_device(self, size: int, segment: int, small: bool, stream: int) -> Block | None:
        """A block of new device memory, as by `alloc_block`; None if the device is full."""
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
