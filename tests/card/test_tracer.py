"""Memory served as a CUDA device serves it: workspaces, the host's tensors, the limit."""

from types import SimpleNamespace

import torch

from memlab import Recipe, SimulatedGPU
from memlab.card.kernels import CUBLASLT_WORKSPACE
from memlab.card.loading import loaded_weights
from memlab.gpus import cublas_workspace

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


def test_a_model_made_without_naming_the_card_lies_on_the_host_until_it_moves():
    with SimulatedGPU("T4"):
        x = torch.ones(8, device="cuda")
        x.cpu()
        model = torch.nn.Linear(1024, 1024)
        assert torch.cuda.memory_allocated() == 512
        model.to("cuda")
        assert torch.cuda.memory_allocated() == 512 + 4 * MiB + 4096


def test_a_moved_weight_may_be_replaced_before_the_end():
    with SimulatedGPU("T4") as card:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model.to("cuda")
        model[1] = torch.nn.Identity()
        training = SimpleNamespace(model=model, recipe=Recipe("gpt2-tiny"))
        names = [step.name for _, step in loaded_weights(card.tracer, training)]
    assert names == ["0.weight", "0.bias"]
