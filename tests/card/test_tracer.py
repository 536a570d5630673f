"""Memory served as a CUDA device serves it: workspaces, the host's tensors, the limit."""

import copy

import pytest
import torch
from helpers import allocated

from memlab import SimulatedGPU
from memlab.card.kernels.scratch import CUBLASLT_WORKSPACE


def workspaces(card):
    lives = card.footprint.timeline.lives
    return [life.nbytes for life in lives if life.category == "workspaces"]


def test_each_thread_takes_a_workspace_at_its_first_product_and_keeps_it(t4):
    x = torch.randn(8, 8, device="cuda", requires_grad=True)
    assert workspaces(t4) == []
    y = x @ x
    y = y @ x
    assert workspaces(t4) == [t4.gpu.workspace]
    y.sum().backward()
    del x, y
    assert workspaces(t4) == [t4.gpu.workspace] * 2


@pytest.mark.parametrize(
    "product", [lambda x, y: torch.mm(x, x, out=y), lambda x, y: y.addmm_(x, x)]
)
def test_a_product_into_a_tensor_takes_a_workspace_too(t4, product):
    x = torch.randn(8, 8, device="cuda")
    product(x, torch.empty_like(x))
    assert workspaces(t4)[0] == t4.gpu.workspace


def test_a_product_with_a_bias_takes_cublaslts_workspace_too(t4):
    torch.nn.Linear(8, 8).to("cuda")(torch.randn(2, 8, device="cuda"))
    assert sorted(workspaces(t4)) == sorted([t4.gpu.workspace, CUBLASLT_WORKSPACE])


def labels_of(loop):
    with SimulatedGPU() as gpu:
        loop()
    return gpu.footprint.breakdown


@pytest.mark.parametrize("by_hand", [False, True])
def test_weights_that_are_no_parameters_are_weights_when_they_are_stepped(by_hand):
    def loop():
        weight = torch.randn(256, 256, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(2):
            (torch.randn(8, 256, device="cuda") @ weight).square().mean().backward()
            if by_hand:
                with torch.no_grad():
                    weight -= 0.1 * weight.grad
            else:
                optimizer.step()
            weight.grad = None

    found = labels_of(loop)
    assert found["parameters"] == found["gradients"] == 256 * 256 * 4


@pytest.mark.parametrize(
    "update",
    [
        lambda ema, now: [
            mine.mul_(0.9).add_(its, alpha=0.1) for mine, its in zip(ema, now, strict=True)
        ],
        lambda ema, now: torch._foreach_lerp_(ema, now, 0.1),
        lambda ema, now: [mine.data.lerp_(its, 0.1) for mine, its in zip(ema, now, strict=True)],
    ],
)
def test_a_moving_average_is_no_activation(update):
    def loop():
        layer = torch.nn.Linear(256, 256, bias=False, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        average = [weight.detach().clone() for weight in layer.parameters()]
        for _ in range(2):
            layer(torch.randn(8, 256, device="cuda")).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                update(average, list(layer.parameters()))

    found = labels_of(loop)
    assert found["buffers"] == found["parameters"] == 256 * 256 * 4
    assert found["activations"] < 256 * 256 * 4


def test_a_weight_that_is_given_its_storage_again_makes_no_step(t4):
    """As PEFT does at every pass with the parameters of experts."""
    steps = []
    t4.steps.on_step_by_hand = lambda: steps.append(1)
    weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
    for _ in range(3):
        with torch.no_grad():
            weight.set_(weight.detach())
        (torch.randn(8, 64, device="cuda") @ weight).square().mean().backward()
    assert not steps
    with torch.no_grad():
        weight.sub_(weight.grad)
    weight.square().sum().backward()
    assert steps == [1]


def test_what_is_overwritten_in_its_own_pass_stays_an_activation():
    def loop():
        layer = torch.nn.Linear(256, 256, bias=False, device="cuda")
        for _ in range(2):
            y = layer(torch.randn(64, 256, device="cuda"))
            y.relu_().square().mean().backward()

    assert labels_of(loop)["buffers"] == 0


def test_a_copy_that_is_let_go_is_gone(gpu):
    layer = torch.nn.Linear(256, 256, device="cuda")
    for one in (layer.weight.detach(), layer.weight, layer):
        before = allocated()
        its_copy = copy.deepcopy(one)
        assert allocated() >= before + 256 * 256 * 4
        del its_copy
        assert allocated() == before


def test_memory_of_the_host_that_is_resized_is_not_the_cards(gpu):
    for size in (4, 2**20):  # with data, and without
        torch.zeros(size).untyped_storage().resize_(2**23)
    torch.zeros(4, device="cuda").untyped_storage().resize_(4096)
    assert [one.nbytes for one in gpu.tracer.storages] == [16, 4096]
