"""The caching allocator's replay against the rules of PyTorch's own."""

import random
from itertools import pairwise

import pytest

from memlab.trace.allocator import CachingAllocator, CapacityError
from memlab.units import MiB, round_up


@pytest.mark.parametrize(
    ("request_bytes", "fixed", "expandable"),
    [
        (1, (512, 2 * MiB), (512, 2 * MiB)),
        (513, (1024, 2 * MiB), (1024, 2 * MiB)),
        (1 * MiB, (1 * MiB, 2 * MiB), (1 * MiB, 2 * MiB)),
        (1 * MiB + 1, (1 * MiB + 512, 20 * MiB), (1 * MiB + 512, 20 * MiB)),
        (10 * MiB, (10 * MiB, 10 * MiB), (10 * MiB, 20 * MiB)),
        # The rest of the 12 MiB segment is under 1 MiB, so the block is not split; blocks of
        # expandable segments are split down to 512 bytes.
        (11 * MiB + 512, (12 * MiB, 12 * MiB), (11 * MiB + 512, 20 * MiB)),
        (20 * MiB + 1, (20 * MiB + 512, 22 * MiB), (20 * MiB + 512, 40 * MiB)),
    ],
)
def test_one_request(request_bytes, fixed, expandable):
    for grows, wanted in ((False, fixed), (True, expandable)):
        allocator = CachingAllocator(expandable_segments=grows)
        allocator.allocate(request_bytes)
        assert (allocator.allocated, allocator.reserved) == wanted


def current(allocator, name, pool="all"):
    return allocator.stats()[name][pool]["current"]


def test_peaks_and_sums_begin_anew():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(50 * MiB))
    allocator.allocate(30 * MiB)
    allocator.reset_peak_stats()
    allocator.reset_accumulated_stats()
    counter = allocator.stats()["allocated_bytes"]["all"]
    assert counter == {"current": 30 * MiB, "peak": 30 * MiB, "allocated": 0, "freed": 0}
    assert allocator.stats()["num_device_alloc"] == 0


def test_a_flush_leaves_segments_that_are_split():
    """`release_cached_blocks` frees what no block of the same segment uses."""
    allocator = CachingAllocator(capacity=100 * MiB)
    whole = allocator.allocate(60 * MiB)
    allocator.free(whole)
    kept = allocator.allocate(20 * MiB)  # 40 MiB of its segment stay in the cache
    with pytest.raises(CapacityError):
        allocator.allocate(42 * MiB)  # neither there nor in the 40 MiB the device has left
    assert allocator.reserved == 60 * MiB
    assert current(allocator, "inactive_split_bytes") == 40 * MiB
    allocator.free(kept)
    allocator.allocate(100 * MiB)
    assert allocator.reserved == 100 * MiB


def check(allocator, live):
    """That blocks tile their segments, free ones do not touch, and the statistics say the same."""
    blocks = sorted(allocator.blocks.values(), key=lambda block: block.address)
    mapped = [block for block in blocks if block.is_mapped]
    assert {block.address for block in mapped if not block.free} == set(live)
    for block, following in pairwise(blocks):
        assert block.address + block.size <= following.address
    for block in blocks:
        after = block.after
        if after is not None:
            assert block.address + block.size == after.address
            assert after.before is block
            assert not (block.free and after.free)
            assert block.is_mapped or after.is_mapped
        if block.is_expandable and not block.is_mapped:
            addresses = block.segment
            assert addresses.down(block.address) == block.address
            assert addresses.up(block.address + block.size) == block.address + block.size
    waiting = sorted((b.size, b.address) for b in blocks if b.free)
    assert waiting == sorted(entry for pool in allocator._free.values() for entry in pool)
    gaps = sorted(b.address for b in blocks if not b.is_mapped)
    assert gaps == sorted(one for pool in allocator._unmapped.values() for one in pool)
    for pool, small in (("small_pool", True), ("large_pool", False)):
        mine = [block for block in mapped if block.small is small]
        held = [block for block in mine if not block.free]
        stuck = [b for b in mine if b.free and b.is_split and not b.is_expandable]
        assert current(allocator, "allocation", pool) == len(held)
        assert current(allocator, "allocated_bytes", pool) == sum(b.size for b in held)
        assert current(allocator, "requested_bytes", pool) == sum(b.requested for b in held)
        assert current(allocator, "inactive_split", pool) == len(stuck)
        assert current(allocator, "inactive_split_bytes", pool) == sum(b.size for b in stuck)
        assert current(allocator, "reserved_bytes", pool) == sum(b.size for b in mine)
    assert current(allocator, "reserved_bytes") == allocator.reserved
    assert current(allocator, "active_bytes") == allocator.allocated <= allocator.reserved


@pytest.mark.parametrize("capacity", [None, 400 * MiB])
@pytest.mark.parametrize("segments", ["fixed", "expandable", "both in turn"])
def test_random_requests_never_overlap_and_statistics_are_what_the_blocks_say(segments, capacity):
    rng, live = random.Random(1), {}
    allocator = CachingAllocator(capacity, expandable_segments=segments == "expandable")
    for turn in range(1500):
        if live and rng.random() < 0.5:
            address = rng.choice(list(live))
            del live[address]
            allocator.free(address)
        else:
            nbytes, stream = int(2 ** rng.uniform(5, 26)), rng.choice((0, 0, 0, 7))
            try:
                live[allocator.allocate(nbytes, stream)] = nbytes
            except CapacityError:
                continue
        if rng.random() < 0.01:
            allocator.empty_cache()
        if segments == "both in turn" and rng.random() < 0.05:
            allocator.expandable_segments = not allocator.expandable_segments
        if turn % 10 == 0:
            check(allocator, live)
        if segments == "expandable":  # elsewhere blocks can be up to 1 MiB larger
            assert allocator.allocated == sum(round_up(nbytes, 512) for nbytes in live.values())
    for address in live:
        allocator.free(address)
    check(allocator, ())
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved, allocator.blocks) == (0, 0, {})
    stats = allocator.stats()
    assert (stats["segment"]["all"]["allocated"] == 0) == (segments == "expandable")
    assert stats["num_device_alloc"] >= stats["num_device_free"] > 0
    for name, pools in stats.items():
        for counter in pools.values() if isinstance(pools, dict) and "all" in pools else ():
            assert counter["allocated"] - counter["freed"] == counter["current"] == 0, name
            assert counter["peak"] <= counter["allocated"], name
