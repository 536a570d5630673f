"""Where a tensor made inside lies, by every way to name a place, and what it says of itself."""

import numpy as np
import pytest
import torch
from helpers import allocated
from torch.testing._internal.two_tensor import TwoTensor

from memlab import SimulatedGPU

CARD = [
    lambda: torch.zeros(3).to(torch.ones(1, device="cuda")),
    lambda: torch.as_tensor(np.arange(3), device="cuda"),
    lambda: torch.tensor(np.arange(3), device="cuda"),
    lambda: torch.tensor(torch.ones(3), device="cuda", requires_grad=True).detach(),
    lambda: torch.as_tensor(torch.ones(3, device="cuda")).clone(),
    lambda: torch.from_numpy(np.ones(3)).to("cuda", non_blocking=True),
    lambda: torch.ones(2, device="cuda").new_tensor([3]),
    lambda: torch.zeros_like(torch.ones(3), device="cuda"),
    lambda: torch.tensor(2.0) * torch.ones(3, device="cuda"),
    lambda: torch.ones(3, device="cuda")[torch.tensor([0, 2])],
    lambda: torch.nn.functional.dropout(torch.ones(3, device="cuda")),
    lambda: torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
    lambda: torch.randn(3, generator=torch.Generator("cuda").manual_seed(1), device="cuda"),
]
HOST = [
    lambda: torch.tensor(0.0),
    lambda: torch.zeros(3),
    lambda: torch.zeros(2**20),  # 4 MiB, without data
    lambda: torch.ones(2**20, device="cuda").to("cpu"),
    lambda: torch.zeros_like(torch.ones(3, device="cuda"), device="cpu"),
    lambda: torch.nn.Linear(1024, 1024).weight * 2,
    lambda: torch.zeros(2**20) + torch.ones(1),
    lambda: torch.ones(2, device="cuda").cpu().new_tensor([3]),
]


@pytest.mark.parametrize("make", CARD)
def test_on_the_card_and_counted(t4, make):
    before = allocated()
    tensor = make()
    assert tensor.device == torch.device("cuda:0") and tensor.is_cuda and not tensor.is_cpu
    assert tensor.get_device() == 0 and tensor.type().startswith("torch.cuda.")
    assert allocated() > before


@pytest.mark.parametrize("make", HOST)
def test_on_the_host_and_not_counted(t4, make):
    tensor = make()
    assert tensor.device == torch.device("cpu") and tensor.is_cpu and not tensor.is_cuda
    assert allocated() == 0
    assert tensor.detach().numpy().shape == tensor.shape


def test_a_context_and_a_default_name_the_card_too(t4):
    with t4.device:
        inside = torch.zeros(3)
    torch.set_default_device("cuda")
    assert inside.is_cuda and torch.zeros(3).is_cuda
    for make in (torch.tensor, torch.as_tensor, torch.asarray):
        assert make([1.0]).is_cuda and make(np.ones(3)).is_cuda
        assert make(np.ones(3), device="cpu").is_cpu
        assert make(np.arange(3)).tolist() == [0, 1, 2] and torch.rand(2).tolist() == [1.0, 1.0]
    torch.set_default_device(None)
    assert torch.zeros(3).is_cpu


@pytest.mark.parametrize(
    "meet",
    [
        lambda card, host: card + host,
        lambda card, host: torch.cat([card, host]),
        lambda card, host: torch.nn.Linear(3, 3)(card),
        lambda card, host: torch.nn.Embedding(3, 3).cuda()(host.long()),
    ],
)
def test_what_lies_apart_does_not_meet(t4, meet):
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and"):
        meet(torch.ones(3, device="cuda"), torch.ones(3))


def test_a_gradient_goes_back_to_where_its_tensor_lies(t4):
    host = torch.zeros(2**20, requires_grad=True)  # as a weight that is moved when it is used
    loss = (host.cuda() * torch.ones(1, device="cuda")).sum().cpu()
    assert loss.is_cpu
    loss.backward()
    assert host.grad.is_cpu and host.grad.shape == host.shape
    del loss
    assert allocated() == 0


def test_a_copy_lands_in_what_is_there(t4):
    host = torch.zeros(3, dtype=torch.long)
    host.copy_(torch.tensor([4, 5, 6], device="cuda"))
    assert host.tolist() == [4, 5, 6]
    card = torch.zeros(3, dtype=torch.long, device="cuda")
    card.copy_(host)
    assert card.tolist() == [4, 5, 6]


def test_a_tensor_of_the_card_is_shown_with_its_place(gpu):
    """A number with its stand-in, anything else without values and with its size."""
    assert repr(torch.zeros((), device="cuda")) == "tensor(1.0, device='cuda:0')"
    shown = repr(torch.zeros(2, 3, dtype=torch.float16, device="cuda"))
    assert shown == "tensor(..., size=(2, 3), device='cuda:0', torch.float16)"


def test_a_tensor_that_is_made_of_others_is_trained_where_they_are():
    before = dict(vars(TwoTensor))
    with SimulatedGPU("H100"):
        halves = [torch.randn(64, 64, device="cuda") for _ in range(2)]
        weight = torch.nn.Parameter(TwoTensor(*halves))
        assert weight.is_cuda and weight.get_device() == 0 and not weight.is_cpu
        (weight @ weight).sum().backward()
        assert weight.grad.device == weight.device == torch.device("cuda", 0)
        held = allocated()
        copied = torch.empty_like(weight.detach()).copy_(weight.detach())
        assert allocated() - held == 2 * 64 * 64 * 4
        assert copied.cpu().device.type == "cpu"
    assert dict(vars(TwoTensor)) == before
    assert TwoTensor(torch.ones(2), torch.ones(2)).device.type == "cpu"


@pytest.mark.parametrize("back", [False, True])
def test_a_tensor_that_is_made_of_others_has_its_data_again_outside(back):
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.weight = torch.nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
    values = layer.weight.a.clone(), layer.weight.b.clone()
    with SimulatedGPU():
        layer.cuda()
        assert layer.weight.is_cuda
        if back:
            layer.cpu()
    assert layer.weight.a.equal(values[0]) and layer.weight.b.equal(values[1])
