"""The allocator's blocks and segments for the formula's tensors, whose order it does not know.

grow: whether segments do, `expandable_segments`. Blocks are then cut to 512 bytes.
"""

import numpy as np

from memlab.trace.allocator import (
    LARGE_ROUND,
    MEDIUM_REQUEST,
    MEDIUM_SEGMENT,
    MIN_BLOCK,
    SMALL_REQUEST,
    SMALL_SEGMENT,
)
from memlab.units import round_up


def blocks_of(sizes: np.ndarray, grow: bool = False) -> np.ndarray:
    """The allocator's blocks for tensors; in a segment of its own, a rest up to 1 MiB included."""
    blocks = round_up(np.ceil(sizes), MIN_BLOCK)
    if grow:
        return blocks
    segments = round_up(blocks, LARGE_ROUND)
    whole = (blocks >= MEDIUM_REQUEST) & (segments - blocks <= SMALL_REQUEST)
    return np.where(whole, segments, blocks)


def without_reuse(blocks, counts, grow: bool = False) -> int:
    """Bytes of the segments if every size of block had its own: the most of each, summed up.

    And one more of the largest that come and go: a smaller tensor splits the free block of one,
    and the next finds it too small. Segments that grow hold blocks of any size, and end with a
    granule.
    """
    sizes, which = np.unique(blocks, return_inverse=True)
    of_each = counts @ (which[:, None] == np.arange(len(sizes)))
    held = of_each.max(axis=0)
    small, large = sizes <= SMALL_REQUEST, sizes >= MEDIUM_REQUEST
    come_and_go = large & (of_each.min(axis=0) < held)
    again = int((sizes * come_and_go).max(initial=0))
    if grow:
        of_small, of_all = int(held @ (sizes * small)), int(held @ sizes)
        of_large = round_up(of_all - of_small + again, MEDIUM_SEGMENT)
        return round_up(of_small, SMALL_SEGMENT) + of_large
    reserved = round_up(again, LARGE_ROUND)
    for sizes_of_pool, segment in (
        (sizes * small, SMALL_SEGMENT),
        (sizes * (~small & ~large), MEDIUM_SEGMENT),
        (round_up(sizes, LARGE_ROUND) * large, LARGE_ROUND),
    ):
        reserved += round_up(int(held @ sizes_of_pool), segment)
    return reserved


def rests_of(blocks, counts) -> int:
    """Bytes that are left of segments which several blocks share, and stay with the last of them.

    The allocator does not split off a rest of up to 1 MiB. In a model whose weights take 1.125 MiB
    each, that is of every segment of 20 MiB the 0.875 MiB beside 17 of them. In which order blocks
    come is not known here: the largest come first, each segment as full as they make it.
    """
    sizes, which = np.unique(blocks, return_inverse=True)
    numbers = np.bincount(which, counts).astype(int)
    shared = (sizes > SMALL_REQUEST) & (sizes < MEDIUM_REQUEST) & (numbers > 0)
    left = dict(
        zip(sizes[shared][::-1].astype(int).tolist(), numbers[shared][::-1].tolist(), strict=True)
    )
    rests = 0
    while left:
        rest, taken = MEDIUM_SEGMENT, {}
        for block, number in left.items():
            fitting = min(number, rest // block)
            if fitting:
                taken[block] = fitting
                rest -= fitting * block
        segments = min(left[block] // number for block, number in taken.items())
        if rest <= SMALL_REQUEST:
            rests += segments * rest
        left = {block: n - segments * taken.get(block, 0) for block, n in left.items()}
        left = {block: n for block, n in left.items() if n}
    return rests
