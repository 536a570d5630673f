"""What a log of allocs and frees gives: peaks, breakdowns, timelines and lives."""

import random
import sys
import threading

import pytest

from memlab.footprint import Phase
from memlab.trace.allocator import CachingAllocator
from memlab.trace.ledger import Ledger

FORWARD, BACKWARD, STEP = Phase.FORWARD, Phase.BACKWARD, Phase.STEP


@pytest.fixture
def log():
    """Two activations of 3 and 5 bytes, a gradient of 2 in the backward pass, a state of 4."""
    log = Ledger()
    small = log.alloc(3, "activations", FORWARD, "layer")
    large = log.alloc(5, "activations", FORWARD, "layer")
    log.alloc(2, "gradients", BACKWARD, "head")
    log.free(large, BACKWARD)
    log.free(small, BACKWARD)
    log.alloc(4, "optimizer_states", STEP, "head")
    return log


def test_the_first_of_equal_peaks_is_the_peak(log):
    log.alloc(4, "temporary", STEP)  # 10 again
    assert log.peak()[2:] == (BACKWARD, 2)


def test_lives_say_from_when_to_when_and_whose(log):
    lives = log.footprint().timeline.lives
    rows = [(life.nbytes, life.module, life.born, life.died) for life in lives]
    assert rows == [
        (3, "layer", 1, 5),
        (5, "layer", 2, 4),
        (2, "head", 3, None),
        (4, "head", 6, None),
    ]
    log.reset_peak()
    # What died before the reset is not in the stretch; what lived through it was there at 0.
    lives = log.footprint().timeline.lives
    assert [(life.nbytes, life.born) for life in lives] == [(2, 0), (4, 0)]


def test_a_graph_that_dies_after_the_backward_pass_still_belongs_to_it():
    log = Ledger()
    kept = log.alloc(3, "activations", FORWARD)
    log.alloc(2, "gradients", BACKWARD)
    log.free(kept, FORWARD)  # the engine has ended
    log.alloc(1, "activations", FORWARD)
    assert [entry.phase for entry in log.entries] == [FORWARD, BACKWARD, BACKWARD, FORWARD]


def test_what_dies_in_another_thread_disturbs_no_footprint():
    ledger = Ledger()
    shared = [ledger.alloc(8, "temporary", FORWARD) for _ in range(2_000)]

    def lets_go():
        for storage in shared:
            ledger.free(storage, FORWARD)

    other = threading.Thread(target=lets_go)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other.start()
    told = [ledger.footprint().peak_allocated]
    while other.is_alive():
        told.append(ledger.footprint().peak_allocated)
    sys.setswitchinterval(usual)
    assert set(told) == {8 * len(shared)}


def test_threads_that_allocate_and_free_at_once_share_the_allocator():
    ledger, errors = Ledger(CachingAllocator()), []

    def work(seed):
        draw, mine = random.Random(seed), []
        try:
            for _ in range(2000):
                mine.append(ledger.alloc(draw.randrange(1, 2**22), "temporary", FORWARD))
                if len(mine) > 8:
                    ledger.free(mine.pop(draw.randrange(8)), FORWARD)
            for storage in mine:
                ledger.free(storage, FORWARD)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(usual)
    assert errors == [] and ledger.allocator.allocated == 0
    assert [storage.number for storage in ledger.storages] == list(range(8000))
