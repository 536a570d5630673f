"""The card's memory: its words when it is full, and a ledger that it serves."""

import pytest
import torch

from memlab import SimulatedGPU
from memlab.card.footprint import card_footprint
from memlab.card.memory import CardMemory
from memlab.footprint import Phase
from memlab.gpus import find_gpu
from memlab.trace.ledger import Ledger

MiB = 2**20


def test_what_is_freed_is_given_again_and_a_full_card_says_so_in_pytorchs_words():
    with SimulatedGPU(512 * MiB) as card:
        room = card.gpu.total_memory - card.gpu.context
        held = torch.empty(room // 2, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as told:
            torch.empty(room // 2 + 4 * MiB, dtype=torch.uint8, device="cuda")
        assert "CUDA out of memory. Tried to allocate" in str(told.value)
        del held
        torch.empty(room // 2 + 4 * MiB, dtype=torch.uint8, device="cuda")


def test_a_replay_is_told_when_and_where():
    ledger = Ledger(CardMemory(find_gpu("T4")))
    storage = ledger.birth(1000, "temporary", Phase.BACKWARD, "encoder")
    ledger.death(storage, Phase.BACKWARD)
    found = card_footprint(ledger)
    assert (found.peak_allocated, found.peak_phase) == (1024, "backward")
    assert found.device_used == found.peak_reserved + find_gpu("T4").context
    assert [life.module for life in found.timeline.lives] == ["encoder"]
