"""Blocks, as PyTorch's caching allocator cuts them, and the sizes that it goes by. In bytes."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from memlab.units import MiB

MIN_BLOCK = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_REQUEST = 1 * MiB  # kSmallSize: requests up to here share 2 MiB segments
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer
MEDIUM_REQUEST = 10 * MiB  # kMinLargeAlloc: requests below it share 20 MiB segments
MEDIUM_SEGMENT = 20 * MiB  # kLargeBuffer
LARGE_ROUND = 2 * MiB  # kRoundLarge: larger segments are rounded up to a multiple of it


class Block:
    """A piece of a segment: used by a tensor, or free and waiting in the cache.

    segment: the bytes of its segment; of an expandable one the `AddressRange`.
    pool: the free blocks of its kind, as (size, address), of which it is one while it is free;
        None for addresses of an expandable segment without memory.
    """

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
        """Whether it shares its segment with other blocks."""
        return self.before is not None or self.after is not None

    @property
    def is_expandable(self) -> bool:
        """Whether its segment is an expandable one."""
        return type(self.segment) is AddressRange

    @property
    def is_mapped(self) -> bool:
        """Whether there is memory at its addresses."""
        return self.pool is not None


class AddressRange:
    """The addresses of an expandable segment, which get memory in granules, `segment_size_`.

    unmapped: the addresses of its pool's blocks without memory, ascending.
    """

    __slots__ = ("start", "granule", "pool", "unmapped")

    def __init__(self, start: int, granule: int, pool: Any, unmapped: list[int]):
        self.start, self.granule, self.pool, self.unmapped = start, granule, pool, unmapped

    def down(self, address: int) -> int:
        """The border of a granule at or below an address."""
        return address - (address - self.start) % self.granule

    def up(self, address: int) -> int:
        """The border of a granule at or above an address."""
        return address + (self.start - address) % self.granule


def take(block: Block) -> None:
    """Take a block out of the cache."""
    block.pool.pop(bisect_left(block.pool, (block.size, block.address)))
