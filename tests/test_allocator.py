"""The caching allocator's replay against the rules of PyTorch's own."""

import random

import pytest

from memlab.allocator import CachingAllocator, CapacityError

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


def test_a_full_device_empties_the_cache_before_it_gives_up():
    allocator = CachingAllocator(capacity=100 * MiB)
    allocator.free(allocator.allocate(60 * MiB))
    allocator.allocate(80 * MiB)
    assert (allocator.reserved, allocator.retries) == (80 * MiB, 1)
    with pytest.raises(CapacityError) as error:
        allocator.allocate(21 * MiB)
    assert error.value.segment == 22 * MiB
    assert allocator.allocated == 80 * MiB


def test_a_segment_in_use_is_not_given_back():
    allocator = CachingAllocator()
    whole = allocator.allocate(60 * MiB)
    allocator.free(whole)
    kept = allocator.allocate(20 * MiB)
    allocator.empty_cache()
    assert allocator.reserved == 60 * MiB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_random_requests_never_overlap_and_leave_nothing_behind():
    rng, allocator, live = random.Random(0), CachingAllocator(), []
    for _ in range(3000):
        if live and rng.random() < 0.5:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            live.append(allocator.allocate(int(2 ** rng.uniform(5, 26))))
        used = sorted((allocator.blocks[a].address, allocator.blocks[a].size) for a in live)
        pairs = zip(used, used[1:], strict=False)
        assert all(start + size <= following for (start, size), (following, _) in pairs)
        assert allocator.allocated == sum(size for _, size in used) <= allocator.reserved
    for address in live:
        allocator.free(address)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved, allocator.blocks) == (0, 0, {})
