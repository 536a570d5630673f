"""The caching allocator's replay against the rules of PyTorch's own."""

import random

import pytest

from memlab.trace.allocator import CachingAllocator, CapacityError

KiB, MiB = 2**10, 2**20


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (1 * MiB, 1 * MiB, 2 * MiB),
        (1 * MiB + 1, 1 * MiB + 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        # The rest of the 12 MiB segment is under 1 MiB, so the block is not split.
        (11 * MiB + 512 * KiB, 12 * MiB, 12 * MiB),
    ],
)
def test_one_request(request_bytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.allocate(request_bytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_freed_memory_stays_reserved_and_is_used_again():
    allocator = CachingAllocator()
    first = allocator.allocate(100 * MiB)
    allocator.free(first)
    assert (allocator.allocated, allocator.reserved) == (0, 100 * MiB)
    assert allocator.allocate(60 * MiB) == first
    assert allocator.reserved == 100 * MiB


def test_best_fit_takes_the_smallest_block_that_is_large_enough():
    allocator = CachingAllocator()
    large, small = allocator.allocate(100 * MiB), allocator.allocate(50 * MiB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(40 * MiB) == small


def test_neighbours_merge_when_freed():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(60 * MiB))
    pieces = [allocator.allocate(20 * MiB) for _ in range(3)]
    assert allocator.reserved == 60 * MiB
    for piece in (pieces[0], pieces[2], pieces[1]):
        allocator.free(piece)
    allocator.allocate(60 * MiB)
    assert allocator.reserved == 60 * MiB


def current(allocator, name, pool="all"):
    return allocator.stats()[name][pool]["current"]


def test_random_requests_never_overlap_and_statistics_are_what_the_blocks_say():
    rng, allocator, live = random.Random(1), CachingAllocator(), []
    for turn in range(2000):
        if live and rng.random() < 0.5:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            live.append(allocator.allocate(int(2 ** rng.uniform(5, 26))))
        if turn % 500 == 499:
            allocator.empty_cache()
        used = sorted((allocator.blocks[a].address, allocator.blocks[a].size) for a in live)
        pairs = zip(used, used[1:], strict=False)
        assert all(start + size <= following for (start, size), (following, _) in pairs)
        for pool, kind in (("small_pool", True), ("large_pool", False)):
            blocks = [block for block in allocator.blocks.values() if block.small is kind]
            held = [block for block in blocks if not block.free]
            stuck = [block for block in blocks if block.free and block.is_split]
            assert current(allocator, "allocation", pool) == len(held)
            assert current(allocator, "allocated_bytes", pool) == sum(b.size for b in held)
            assert current(allocator, "requested_bytes", pool) == sum(b.requested for b in held)
            assert current(allocator, "inactive_split", pool) == len(stuck)
            assert current(allocator, "inactive_split_bytes", pool) == sum(b.size for b in stuck)
            assert current(allocator, "reserved_bytes", pool) == sum(b.size for b in blocks)
        assert current(allocator, "reserved_bytes") == allocator.reserved
        assert current(allocator, "active_bytes") == allocator.allocated
    for name, pools in allocator.stats().items():
        for counter in pools.values() if isinstance(pools, dict) and "all" in pools else ():
            assert counter["allocated"] - counter["freed"] == counter["current"], name
            assert counter["current"] <= counter["peak"] <= counter["allocated"], name
    for address in live:
        allocator.free(address)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved, allocator.blocks) == (0, 0, {})


def test_peaks_and_sums_begin_anew():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(50 * MiB))
    allocator.allocate(30 * MiB)
    allocator.reset_peak_stats()
    allocator.reset_accumulated_stats()
    counter = allocator.stats()["allocated_bytes"]["all"]
    assert counter == {"current": 30 * MiB, "peak": 30 * MiB, "allocated": 0, "freed": 0}
    assert allocator.stats()["num_device_alloc"] == 0


def test_a_retry_and_an_out_of_memory_are_counted_and_traced():
    allocator = CachingAllocator(capacity=100 * MiB)
    allocator.free(allocator.allocate(60 * MiB))
    allocator.allocate(80 * MiB)  # a retry that helps
    with pytest.raises(CapacityError):
        allocator.allocate(30 * MiB + 1)  # one that does not
    stats = allocator.stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (2, 1)
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (2, 1)
    assert [action for action, *_ in allocator.trace] == [
        "segment_alloc", "alloc", "free", "segment_free", "segment_alloc", "alloc", "oom"
    ]  # fmt: skip
    assert allocator.trace[-1] == ("oom", 20 * MiB, 30 * MiB + 512)


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
