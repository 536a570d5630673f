"""Expandable segments: sequences worked by hand from the rules of PyTorch's own source."""

import pytest

from memlab.trace.allocator import CachingAllocator, CapacityError
from memlab.units import MiB


def expandable(capacity=None, **settings):
    return CachingAllocator(capacity, expandable_segments=True, **settings)


def taken(allocator, *sizes):
    """The addresses of requests, in MiB."""
    return [allocator.allocate(size * MiB) for size in sizes]


def test_a_request_begins_in_what_is_free_before_new_memory():
    allocator = expandable()
    first, second, third = taken(allocator, 30, 30, 20)
    assert (second - first, third - first) == (30 * MiB, 60 * MiB)
    assert allocator.reserved == 80 * MiB
    maps = [(kind, at - first, nbytes) for kind, at, nbytes in allocator.trace if "map" in kind]
    assert maps == [
        ("segment_map", 0, 40 * MiB),
        ("segment_map", 40 * MiB, 20 * MiB),
        ("segment_map", 60 * MiB, 20 * MiB),
    ]


def test_each_pool_of_each_stream_has_a_range():
    allocator = expandable()
    allocator.allocate(100)
    allocator.allocate(100, stream=3)
    allocator.free(allocator.allocate(5 * MiB))
    allocator.allocate(5 * MiB, stream=3)
    assert allocator.reserved == 2 * (2 + 20) * MiB


def test_an_emptied_cache_gives_back_whole_granules_between_used_blocks():
    allocator = expandable()
    first, second, third = taken(allocator, 30, 30, 20)
    allocator.free(second)
    allocator.empty_cache()
    # Of 30 to 60 MiB the granule from 40 on.
    assert allocator.reserved == 60 * MiB
    assert allocator.trace[-1] == ("segment_unmap", first + 40 * MiB, 20 * MiB)
    assert allocator.device_frees == 1
    # 10 MiB are free before the gap of 20 MiB: the lowest place for 25 MiB, and too small for 35.
    assert taken(allocator, 35) == [first + 80 * MiB]
    assert allocator.reserved == 100 * MiB
    assert taken(allocator, 25) == [second]
    assert allocator.reserved == 120 * MiB


def test_a_gap_is_mapped_up_to_the_free_block_behind_it():
    allocator = expandable()
    first, second, third = taken(allocator, 45, 10, 25)
    allocator.free(first)
    allocator.empty_cache()  # 0 to 40 MiB: 5 MiB before the second block stay
    assert allocator.reserved == 40 * MiB
    assert taken(allocator, 43) == [first]
    assert allocator.reserved == 80 * MiB
    assert taken(allocator, 2) == [first + 43 * MiB]


def test_best_fit_leaves_the_block_that_can_grow():
    allocator = expandable()
    first, _ = taken(allocator, 30, 4)  # 6 MiB stay free at the end, which can grow
    allocator.free(first)
    assert taken(allocator, 5) == [first]
    allocator = CachingAllocator()
    first, second, _ = taken(allocator, 30, 10, 4)
    allocator.free(first)
    allocator.free(second)
    assert taken(allocator, 5) != [first]  # the smallest, else


def test_a_full_device_gives_back_granules_and_maps_them_elsewhere():
    allocator = expandable(100 * MiB, device_memory=200 * MiB)
    first, second = taken(allocator, 50, 30)
    allocator.free(first)
    assert taken(allocator, 60) == [second + 30 * MiB]
    assert (allocator.reserved, allocator.retries) == (100 * MiB, 1)
    with pytest.raises(CapacityError) as error:
        allocator.allocate(11 * MiB)
    assert error.value.segment == 12 * MiB  # what PyTorch says it tried, though it maps granules
    assert (allocator.ooms, allocator.retries) == (1, 2)
    assert taken(allocator, 10) == [first + 40 * MiB]


def test_a_range_ends_at_nine_eighths_of_the_device():
    allocator = expandable(100 * MiB)  # 112.5 MiB, in whole granules 120 MiB
    first, second = taken(allocator, 50, 30)
    allocator.free(first)
    (third,) = taken(allocator, 60)
    assert not first <= third < first + 120 * MiB
    assert allocator.reserved == 100 * MiB


def test_what_was_mapped_for_a_request_that_failed_stays_in_the_cache():
    allocator = expandable(100 * MiB)
    start, _ = taken(allocator, 60, 20)
    allocator.free(start)
    allocator.empty_cache()
    first, second = taken(allocator, 20, 20)
    allocator.free(first)
    allocator.empty_cache()
    allocator.free(second)  # 20 MiB without memory, 20 MiB free, 20 MiB without
    allocator.allocate(40 * MiB, stream=3)
    assert allocator.reserved == 80 * MiB
    before = len(allocator.trace)
    with pytest.raises(CapacityError):
        taken(allocator, 60)
    assert allocator.trace[before:-1] == [
        ("segment_map", start, 20 * MiB),
        ("segment_unmap", start, 40 * MiB),
    ]
    assert allocator.trace[-1] == ("oom", 40 * MiB, 60 * MiB)


def test_it_can_be_turned_on_and_off():
    """The requests of `test_max_split_expandable` in PyTorch's test/test_cuda.py.

    Its max_split_size_mb is left out: no block there is split in segments that do not grow.
    """
    allocator = CachingAllocator(120 * MiB)
    blocks = []
    for on in (False, True, False):
        allocator.expandable_segments = on
        blocks += taken(allocator, 40)
    assert allocator.reserved == 120 * MiB
    with pytest.raises(CapacityError):
        allocator.allocate(40 * MiB)
    for block in blocks:
        allocator.free(block)
    taken(allocator, 120)
    assert allocator.reserved == 120 * MiB


def test_while_it_is_off_ranges_serve_nothing():
    allocator = expandable()
    allocator.free(allocator.allocate(30 * MiB))
    allocator.expandable_segments = False
    taken(allocator, 20)
    assert allocator.reserved == (40 + 20) * MiB
    allocator.expandable_segments = True
    taken(allocator, 20)
    assert allocator.reserved == (40 + 20) * MiB
