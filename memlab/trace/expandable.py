"""Expandable segments of PyTorch's caching allocator: segments that grow where they are.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` under `expandable_segments:True`, as the
main branch has them around PyTorch 2.11 (the text that was read has all that the headers of 2.13
declare); they are the same in the text of the end of 2024:

- Each pool of a stream has a range of addresses for 1 1/8 of the device's memory. Memory is put
  there in granules, of 2 MiB in the small pool and 20 MiB in the large one, as many as a request
  needs: at the lowest address where it fits, free blocks beside included (`map_block`,
  `find_expandable_block`). Only what has memory is reserved.
- A block is split wherever 512 bytes are left, a large one too (`should_split`).
- Best fit takes a block that could grow for as large as it could become (`get_free_block`).
- An emptied cache gives back the whole granules inside each free block (`unmap_block`), also of
  blocks between used ones.
- No segments and no inactive splits are counted.
"""

from bisect import bisect_left, insort

from memlab.trace.allocator_blocks import MEDIUM_SEGMENT, SMALL_SEGMENT, AddressRange, Block, take
from memlab.trace.segments import Segments
from memlab.units import round_up

ADDRESSES = 1 << 40  # of a range where the device has no limit


class ExpandableSegments(Segments):
    """What `CachingAllocator` does with expandable segments.

    expandable_segments: whether new memory comes in them. PyTorch lets a program change it at any
        time: what they have free then serves no request until it is on again.
    """

    def _expandable_fit(self, free: list[tuple[int, int]], best: int) -> int:
        """The number of the free block that is taken, where `best` is the smallest in size."""
        blocks = [self.blocks[address] for _, address in free[best : best + 2]]
        if not blocks or not blocks[0].is_expandable:
            return best
        if not self.expandable_segments:
            while best < len(free) and self.blocks[free[best][1]].is_expandable:
                best += 1
            return best
        while len(blocks) == 2 and blocks[0].is_expandable and _room(blocks[1]) < _room(blocks[0]):
            best += 1
            blocks = [self.blocks[address] for _, address in free[best : best + 2]]
        return best

    def _expand(self, size: int, small: bool, stream: int) -> Block | None:
        """A block of at least so many bytes, out of the cache; None where the device is full.

        What was mapped until then stays in the cache, as in PyTorch.
        """
        block = self._expandable_block(size, small, stream)
        while not block.is_mapped or block.size < size:
            to_map, missing = block, size
            if block.is_mapped and block.after is not None:  # free, and before one without memory
                to_map, missing = block.after, size - block.size
            mapped = self._map(to_map, min(missing, to_map.size))
            if mapped is None:
                return None
            block = mapped
        take(block)
        return block

    def _expandable_block(self, size: int, small: bool, stream: int) -> Block:
        """The lowest block, free or without memory, from which a request fits, or a new range."""
        unmapped = self._unmapped.setdefault((stream, small), [])
        for address in unmapped:
            block = self.blocks[address]
            if block.before is not None and block.before.free:
                block = block.before
            if _fits_from(block, size):
                return block
        granule = SMALL_SEGMENT if small else MEDIUM_SEGMENT
        memory = self._device_memory
        length = max(ADDRESSES, 2 * size) if memory is None else memory + memory // 8
        start = self._new_addresses(round_up(length, granule))
        addresses = AddressRange(start, granule, self._free[stream, small], unmapped)
        block = Block(start, round_up(length, granule), small, addresses, None)
        block.free = False
        self.blocks[start] = block
        insort(unmapped, start)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Put memory to the first `size` bytes of a block without: it, merged with free ones."""
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
        """Give back the whole granules of a free block; a range without memory goes, too."""
        addresses = block.segment
        start = addresses.up(block.address)
        nbytes = addresses.down(block.address + block.size) - start
        if nbytes <= 0:
            return
        take(block)
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
        if not block.is_split:
            unmapped.remove(block.address)
            del self.blocks[block.address]


def _room(block: Block) -> int:
    """The bytes that a free block could grow to, into addresses without memory behind it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


def _fits_from(block: Block | None, size: int) -> bool:
    """Whether so many bytes of addresses without a tensor begin with a block."""
    nbytes = 0
    while nbytes < size and block is not None and (block.free or not block.is_mapped):
        nbytes, block = nbytes + block.size, block.after
    return nbytes >= size
