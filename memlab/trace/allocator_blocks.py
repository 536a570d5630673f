"""Blocks and address ranges of PyTorch's caching allocator, and its size constants, in bytes.

The constants have their values in c10/core/AllocatorConfig.h and
c10/cuda/CUDACachingAllocator.cpp; the comments give their names there.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from memlab.units import MiB

MIN_BLOCK = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_REQUEST = 1 * MiB  # kSmallSize: requests up to this size share 2 MiB segments
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer
MEDIUM_REQUEST = 10 * MiB  # kMinLargeAlloc: larger requests below it share 20 MiB segments
MEDIUM_SEGMENT = 20 * MiB  # kLargeBuffer
LARGE_ROUND = 2 * MiB  # kRoundLarge: larger segments are rounded up to a multiple of it


class Block:
    """A piece of a segment: in use by a tensor, or free and in the cache.

    segment: bytes of its segment; for an expandable segment, its `AddressRange`.
    pool: the sorted (size, address) list of the free blocks of its stream and size class, which
        it is part of while it is free; None for expandable addresses that have no memory.
    """

    # Blocks are created in the inner loop of a replay, so they have no __dict__.
    __slots__ = (
        *("address", "size", "small", "segment", "pool"),
        *("free", "before", "after", "requested"),
    )

    before: Block | None
    after: Block | None

    def __init__(self, address: int, size: int, small: bool, segment: Any, pool: Any):
        self.address, self.size, self.small, self.segment = address, size, small, segment
        self.pool = pool
        self.free, self.before, self.after, self.requested = True, None, None, 0

    @property
    def is_split(self) -> bool:
        """Whether the block shares its segment with other blocks."""
        return self.before is not None or self.after is not None

    @property
    def is_expandable(self) -> bool:
        """Whether the segment of the block is expandable."""
        return type(self.segment) is AddressRange

    @property
    def is_mapped(self) -> bool:
        """Whether the addresses of the block have memory; only expandable ones may have none."""
        return self.pool is not None


class AddressRange:
    """The address range of an expandable segment; memory is mapped into it in granules.

    granule: bytes of a granule, `segment_size_` of PyTorch's `ExpandableSegment`.
    unmapped: start addresses of the blocks without memory, ascending; all ranges of a pool share
        the list.
    """

    __slots__ = ("start", "granule", "pool", "unmapped")

    def __init__(self, start: int, granule: int, pool: Any, unmapped: list[int]):
        self.start, self.granule, self.pool, self.unmapped = start, granule, pool, unmapped

    def down(self, address: int) -> int:
        """Round an address down to the border of a granule."""
        return address - (address - self.start) % self.granule

    def up(self, address: int) -> int:
        """Round an address up to the border of a granule."""
        return address + (self.start - address) % self.granule


def take(block: Block) -> None:
    """Remove a free block from the list of its pool."""
    block.pool.pop(bisect_left(block.pool, (block.size, block.address)))
