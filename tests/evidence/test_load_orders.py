"""Orders in which a quantized base may have been loaded, and the range of what stays reserved."""

import pytest
import torch
from helpers import QLORA

from memlab import models, simulate
from memlab.card.load_order import loaded_by_transformers, peak_reserved
from memlab.evidence.load_orders import reserved_range, simulate_ways, ways
from memlab.gpus import ANY_CARD
from memlab.libraries import import_bitsandbytes
from memlab.predict.run import log_of
from memlab.trace.events import Marker

import_bitsandbytes("this test")
MiB = 2**20


@pytest.fixture(scope="module")
def log():
    return log_of(QLORA)


def test_a_range_holds_what_todays_transformers_leaves_and_only_a_base_has_one(log):
    for recipe in (QLORA, QLORA.but(expandable_segments=True)):
        found, alone = simulate_ways(recipe, ANY_CARD), simulate(recipe)
        grows = recipe.expandable_segments
        assert found.reserved_range == reserved_range(log, None, None, grows)
        low, high = found.reserved_range
        today = peak_reserved(loaded_by_transformers(log), None, grows)
        assert found.peak_allocated <= low <= today == found.peak_reserved <= high
        assert alone.peak_reserved == today and alone.reserved_range is None
    assert simulate_ways(QLORA.but(base="none"), ANY_CARD).reserved_range is None
    assert "peak reserved, as a range: " in str(found)
    assert found.as_dict()["reserved_range"] == [low, high]


def test_a_way_that_runs_out_of_memory_takes_all_there_is(log):
    whole = peak_reserved(list(ways(log))[-1])
    assert peak_reserved(list(ways(log))[-1], 4 * MiB) is None
    assert reserved_range(log, whole - 2 * MiB, None)[1] <= whole - 2 * MiB


@pytest.mark.sampled(1)
@pytest.mark.parametrize("upcast", [True, False])
def test_an_emptied_cache_forgets_most_of_the_loading(upcast, monkeypatch):
    """peft's casts to fp32 end with one, and the Trainer begins so."""
    config = models.config("llama-3-8b")
    config.num_hidden_layers, config.vocab_size = 6, 1000
    config.bos_token_id = config.eos_token_id = 1
    recipe = QLORA.but(model=config, upcast=upcast)
    assert Marker.EMPTY_CACHE in log_of(recipe).steps
    emptied = simulate_ways(recipe, ANY_CARD)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    kept = simulate_ways(recipe, ANY_CARD)
    half = 2 * kept.parameters
    assert kept.reserved_range[1] >= half > emptied.reserved_range[1]
