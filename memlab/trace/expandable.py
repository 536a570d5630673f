"""Expandable segments of PyTorch's caching allocator: segments that grow in place.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` under `expandable_segments:True`, on the
main branch around PyTorch 2.11. That source has everything that the headers of 2.13 declare, and
the source of late 2024 has the same rules:

- Each pool of a stream has an address range of 1 1/8 times the device's memory. Memory is mapped
  into it in granules of 2 MiB (small pool) or 20 MiB (large pool), as many as a request needs. They
  are mapped at the lowest address where the request fits, adjacent free blocks included
  (`find_expandable_block`, `map_block`). Only mapped memory is reserved.
- A block is split if at least 512 bytes remain, in the large pool too (`should_split`).
- Best fit counts a block that can grow at the size that it could grow to (`get_free_block`).
- Emptying the cache unmaps the whole granules inside each free block, also of a block between two
  used ones (`unmap_block`).
- The statistics count no segments and no inactive splits.
"""

from bisect import bisect_left, insort

from memlab.trace.allocator_blocks import MEDIUM_SEGMENT, SMALL_SEGMENT, AddressRange, Block, take
from memlab.trace.segments import Segments
from memlab.units import round_up

ADDRESSES = 1 << 40  # bytes of an address range on a device without a limit


class ExpandableSegments(Segments):
    """The part of `CachingAllocator` that handles expandable segments.

    expandable_segments: whether new memory goes into expandable segments. A program may change it
        at any time. While it is off, their free blocks serve no request.
    """

    def _expandable_fit(self, free: list[tuple[int, int]], best: int) -> int:
        """The index of the free block to use; best: that of the smallest block that fits."""
        blocks = [self.blocks[address] for _, address in free[best : best + 2]]
        if not blocks or not blocks[0].is_expandable:
            return best
        # get_free_block: with the setting off, take the first block of an ordinary segment.
        if not self.expandable_segments:
            while best < len(free) and self.blocks[free[best][1]].is_expandable:
                best += 1
            return best
        # get_free_block: go on to larger blocks while the next one could grow to less. This keeps
        # the block at the end of a range, which can become the largest, for large requests.
        while len(blocks) == 2 and blocks[0].is_expandable and _room(blocks[1]) < _room(blocks[0]):
            best += 1
            blocks = [self.blocks[address] for _, address in free[best : best + 2]]
        return best

    def _expand(self, size: int, small: bool, stream: int) -> Block | None:
        """Map a block of at least `size` bytes and take it from the cache; None if it has no room.

        Memory that was mapped before the device was full stays in the cache, as in PyTorch.
        """
        # try_allocate_expandable_block. `_map` merges new memory with the free blocks around it.
        # So each turn leaves a longer free block, which unmapped addresses may follow.
        block = self._expandable_block(size, small, stream)
        while not block.is_mapped or block.size < size:
            to_map, missing = block, size
            if block.is_mapped and block.after is not None:  # free, with unmapped addresses after
                to_map, missing = block.after, size - block.size
            mapped = self._map(to_map, min(missing, to_map.size))
            if mapped is None:
                return None
            block = mapped
        take(block)
        return block

    def _expandable_block(self, size: int, small: bool, stream: int) -> Block:
        """Where to map a request: the lowest block, free or unmapped, from which it fits.

        If it fits nowhere, that is a new address range.
        """
        # find_expandable_block
        unmapped = self._unmapped.setdefault((stream, small), [])
        for address in unmapped:
            block = self.blocks[address]
            # The request can begin in the free block that ends where the unmapped one begins.
            if block.before is not None and block.before.free:
                block = block.before
            if _fits_from(block, size):
                return block
        granule = SMALL_SEGMENT if small else MEDIUM_SEGMENT
        memory = self._device_memory
        # 1 1/8 of the memory, so that granules can be moved to the end when gaps are too small.
        length = max(ADDRESSES, 2 * size) if memory is None else memory + memory // 8
        start = self._new_addresses(round_up(length, granule))
        addresses = AddressRange(start, granule, self._free[stream, small], unmapped)
        block = Block(start, round_up(length, granule), small, addresses, None)
        block.free = False  # unmapped blocks count as neither free nor in use
        self.blocks[start] = block
        insort(unmapped, start)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Map memory for the first `size` bytes of an unmapped block; None if the device is full.

        Returns the mapped block, merged with the free blocks around it, which is in the cache.
        """
        # map_block. Unmapped blocks begin at the border of a granule, so only the end is rounded.
        addresses = block.segment
        nbytes = addresses.up(block.address + size) - block.address
        if self._too_full_for(nbytes):
            return None
        start, unmapped = block.address, addresses.unmapped
        unmapped.pop(bisect_left(unmapped, start))
        if nbytes < block.size:
            rest = self._cut(block, nbytes)
            rest.free = False
            insort(unmapped, rest.address)
        block.free, block.pool = True, addresses.pool
        if block.before is not None and block.before.free:
            take(block.before)
            block = self._merge(block.before, block)
        if block.after is not None and block.after.free:
            take(block.after)
            block = self._merge(block, block.after)
        insort(block.pool, (block.size, block.address))
        self._reserve("segment_map", block.small, start, nbytes)
        return block

    def _unmap(self, block: Block) -> None:
        """Unmap the whole granules of a free block; drop its range if no memory is left in it."""
        # unmap_block, ExpandableSegment::unmap
        addresses = block.segment
        start = addresses.up(block.address)
        nbytes = addresses.down(block.address + block.size) - start
        if nbytes <= 0:
            return
        take(block)
        # free -> unmapped -> free: what lies outside whole granules keeps its memory.
        if start > block.address:
            before, block = block, self._cut(block, start - block.address)
            insort(before.pool, (before.size, before.address))
        if nbytes < block.size:
            rest = self._cut(block, nbytes)
            insort(rest.pool, (rest.size, rest.address))
        block.free, block.pool = False, None
        unmapped = addresses.unmapped
        if block.before is not None and not block.before.is_mapped:
            unmapped.remove(block.before.address)
            block = self._merge(block.before, block)
        if block.after is not None and not block.after.is_mapped:
            unmapped.remove(block.after.address)
            block = self._merge(block, block.after)
        insort(unmapped, block.address)
        self._reserve("segment_unmap", block.small, start, -nbytes)
        if not block.is_split:  # release_expandable_segment: one unmapped block is the whole range
            unmapped.remove(block.address)
            del self.blocks[block.address]


def _room(block: Block) -> int:
    """The size to which a free block could grow, into unmapped addresses after it.

    `expandable_size` in `get_free_block`.
    """
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


def _fits_from(block: Block | None, size: int) -> bool:
    """Whether `size` bytes of free or unmapped addresses start at a block.

    `has_available_address_space` in `find_expandable_block`.
    """
    nbytes = 0
    while nbytes < size and block is not None and (block.free or not block.is_mapped):
        nbytes, block = nbytes + block.size, block.after
    return nbytes >= size
