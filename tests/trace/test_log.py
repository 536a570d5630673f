"""A log without storages: written from a ledger, lived through again."""

from collections import Counter

from memlab.footprint import Phase
from memlab.trace.allocator import CachingAllocator
from memlab.trace.events import OUTSIDE, Alloc, Free, Marker
from memlab.trace.ledger import Ledger
from memlab.trace.log import Log, replay

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
LARGE = 20 * 2**20  # bytes of a segment


def a_ledger():
    """Two layers' activations, freed by the backward pass in reverse, and an emptied cache."""
    ledger = Ledger(CachingAllocator())
    first = ledger.alloc(LARGE, "activations", FORWARD, "layers.0.mlp")
    second = ledger.alloc(LARGE, "activations", FORWARD, "layers.1.mlp")
    ledger.reset_peak()
    ledger.free(second, BACKWARD)
    ledger.empty_cache()
    ledger.free(first, BACKWARD)
    return ledger


def test_storages_of_like_birth_are_told_apart_by_their_place_and_layers_by_their_number():
    alloc = Alloc(LARGE, "activations", FORWARD, "layers.*.mlp", "made before")
    freed = Free(alloc, BACKWARD, -1)
    steps = Log.of(a_ledger(), Counter()).steps
    assert steps == [alloc, alloc, Marker.RESET, freed, Marker.EMPTY_CACHE, freed]
    steps = Log.of(a_ledger(), Counter(), numbered=True).steps
    assert [step.module for step in steps[:2]] == ["layers.0.mlp", "layers.1.mlp"]


def test_norms_of_gradients_are_as_many_as_weights_and_what_is_as_large_before_is_no_norm():
    """Of 24 trained weights the norms have 96 bytes, as 24 frequencies of rotary positions do."""
    ledger = Ledger(CachingAllocator())
    frequencies = ledger.alloc(96, "temporary", FORWARD, OUTSIDE, "aten.pow")
    ledger.free(frequencies, FORWARD)
    ledger.free(ledger.alloc(1000, "gradients", BACKWARD, "layers.0.mlp"), BACKWARD)
    ledger.alloc(96, "temporary", FORWARD, OUTSIDE, "aten.stack")
    log = Log.of(ledger, Counter({(10, True): 24}))
    assert [step.nbytes for step in log.steps if type(step) is Alloc] == [96, 1000, -4]


def test_a_replay_gives_the_same_footprint():
    ledger, again = a_ledger(), Ledger(CachingAllocator())
    replay(Log.of(ledger, Counter(), numbered=True).events(), again)
    assert again.footprint() == ledger.footprint()
    assert again.footprint().timeline.phases == ledger.footprint().timeline.phases
    assert [entry[1:] for entry in again.entries] == [entry[1:] for entry in ledger.entries]
