"""Memory served as a CUDA device serves it: workspaces, the host's tensors, the limit."""

import pytest
import torch

from memlab import SimulatedGPU
from memlab.card.kernels import CUBLASLT_WORKSPACE
from memlab.card.memory import CardMemory, card_footprint
from memlab.footprint import Phase
from memlab.gpus import cublas_workspace, find_gpu
from memlab.trace.ledger import Ledger

MiB = 2**20


def workspaces(card):
    lives = card.footprint.timeline.lives
    return [life.nbytes for life in lives if life.category == "workspaces"]


def test_each_thread_takes_a_workspace_at_its_first_product_and_keeps_it():
    with SimulatedGPU("T4") as card:
        x = torch.randn(8, 8, device="cuda", requires_grad=True)
        assert workspaces(card) == []
        y = x @ x
        y = y @ x
        assert workspaces(card) == [card.gpu.workspace]
        y.sum().backward()
        del x, y
        assert workspaces(card) == [card.gpu.workspace] * 2


def test_a_product_with_a_bias_takes_cublaslts_workspace_too():
    with SimulatedGPU("T4") as card:
        torch.nn.Linear(8, 8).to("cuda")(torch.randn(2, 8, device="cuda"))
        assert sorted(workspaces(card)) == sorted([card.gpu.workspace, CUBLASLT_WORKSPACE])


def test_without_a_card_the_workspace_is_that_of_compute_capability_8():
    with SimulatedGPU() as card:
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
        assert workspaces(card) == [cublas_workspace((8, 0))]


def test_host_tensors_take_no_room_until_they_are_needed_on_the_card():
    outside = torch.zeros(MiB)
    with SimulatedGPU("T4") as card:
        outside + 1
        number = torch.tensor(3.0)
        number + 1
        assert torch.cuda.memory_allocated() == 0
        moved = outside.to("cuda")
        assert torch.cuda.memory_allocated() == moved.nbytes
        del moved
        assert torch.cuda.memory_allocated() == 0
        assert card.footprint.peak_allocated == outside.nbytes


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
