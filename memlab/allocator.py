"""PyTorch's CUDA caching allocator, in Python: from requests to reserved memory.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings (no
expandable segments, no `max_split_size_mb`, one stream). Everything is in bytes.
"""

from bisect import bisect_left, insort

MiB = 2**20
MIN_BLOCK = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_REQUEST = 1 * MiB  # kSmallSize: requests up to here share 2 MiB segments
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer
MEDIUM_REQUEST = 10 * MiB  # kMinLargeAlloc: requests below it share 20 MiB segments
MEDIUM_SEGMENT = 20 * MiB  # kLargeBuffer
LARGE_ROUND = 2 * MiB  # kRoundLarge: larger segments are rounded up to a multiple of it


class CapacityError(Exception):
    """A segment that the device cannot give, even after the cache was emptied."""

    def __init__(self, segment: int):
        super().__init__(f"no room for a segment of {segment} bytes")
        self.segment = segment


class Block:
    """A piece of a segment: used by a tensor, or free and waiting in the cache."""

    __slots__ = ("address", "size", "small", "segment", "free", "before", "after")

    def __init__(self, address, size, small, segment):
        self.address, self.size, self.small, self.segment = address, size, small, segment
        self.free, self.before, self.after = True, None, None


class CachingAllocator:
    """Serves requests from cached blocks first and asks the device for segments otherwise.

    capacity: bytes that the device can give in all; None means no limit.

    `allocated` counts the blocks in use, `reserved` the segments taken from the device; both in
    bytes, as `torch.cuda.memory_allocated()` and `memory_reserved()` report them.
    """

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.allocated = self.reserved = self.retries = 0
        self.blocks: dict[int, Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        # cudaMalloc was seen to hand out descending addresses, and best fit breaks ties by the
        # lower one; segments never touch, so only their order matters.
        self._next_segment = 1 << 60

    def allocate(self, nbytes: int) -> int:
        """Reserve a block for `nbytes` bytes and return its address.

        Raises CapacityError when the device is full, after emptying the cache once.
        """
        size = max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)
        small = size <= SMALL_REQUEST
        block = self._best_fit(size, small) or self._new_segment(size, small)
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL_REQUEST:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block.address

    def free(self, address: int) -> None:
        """Give a block back to the cache and merge it with free neighbours."""
        block = self.blocks[address]
        self.allocated -= block.size
        block.free = True
        if block.before and block.before.free:
            block = self._merge(block.before, block)
        if block.after and block.after.free:
            block = self._merge(block, block.after)
        insort(self._free[block.small], (block.size, block.address))

    def empty_cache(self) -> None:
        """Return every wholly free segment to the device."""
        for small in (True, False):
            kept = []
            for size, address in self._free[small]:
                if size == self.blocks[address].segment:
                    self.reserved -= size
                    del self.blocks[address]
                else:
                    kept.append((size, address))
            self._free[small] = kept

    def _best_fit(self, size, small):
        free = self._free[small]
        i = bisect_left(free, (size, 0))
        return self.blocks[free.pop(i)[1]] if i < len(free) else None

    def _new_segment(self, size, small):
        if small:
            segment = SMALL_SEGMENT
        elif size < MEDIUM_REQUEST:
            segment = MEDIUM_SEGMENT
        else:
            segment = -(-size // LARGE_ROUND) * LARGE_ROUND
        if self._too_full_for(segment):
            self.retries += 1
            self.empty_cache()
            if self._too_full_for(segment):
                raise CapacityError(segment)
        self._next_segment -= 1 << 42
        block = Block(self._next_segment, segment, small, segment)
        self.blocks[block.address] = block
        self.reserved += segment
        return block

    def _too_full_for(self, segment):
        return self.capacity is not None and self.reserved + segment > self.capacity

    def _split(self, block, size):
        rest = Block(block.address + size, block.size - size, block.small, block.segment)
        rest.before, rest.after = block, block.after
        if block.after:
            block.after.before = rest
        block.size, block.after = size, rest
        self.blocks[rest.address] = rest
        insort(self._free[rest.small], (rest.size, rest.address))

    def _merge(self, left, right):
        for block in (left, right):  # one of the two is in the cache already
            free = self._free[block.small]
            i = bisect_left(free, (block.size, block.address))
            if i < len(free) and free[i] == (block.size, block.address):
                free.pop(i)
        left.size, left.after = left.size + right.size, right.after
        if right.after:
            right.after.before = left
        del self.blocks[right.address]
        return left
