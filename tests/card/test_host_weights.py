"""Weights on the host that have no data here behave as smaller ones, which have, do."""

import accelerate
import pytest
import torch
from accelerate.utils import set_module_tensor_to_device

from memlab import SimulatedGPU

SIZES = (16, 1024)  # with data on the host, and without


@pytest.mark.parametrize("size", SIZES)
def test_an_empty_model_is_nowhere_until_it_is_filled(t4, size):
    with accelerate.init_empty_weights():
        layer = torch.nn.Linear(size, size)
    assert layer.weight.device.type == layer.bias.device.type == "meta"
    assert layer.weight.requires_grad and isinstance(layer.weight, torch.nn.Parameter)
    assert torch.cuda.memory_allocated() == 0
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.zeros(size, size))
    assert layer.weight.device.type == "cpu"
    set_module_tensor_to_device(layer, "weight", "cuda", value=torch.zeros(size, size))
    assert layer.weight.is_cuda
    assert t4.footprint.peak_tensors == 4 * size**2


class Lazy:
    """A tensor of a checkpoint that is read when it is used, as Lightning loads them."""

    def __init__(self, data):
        self.storage, self.shape, self.dtype = data.untyped_storage(), data.shape, data.dtype

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [one.read() if isinstance(one, cls) else one for one in args]
        return func(*args, **(kwargs or {}))

    def read(self):
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        return tensor.set_(self.storage, 0, self.shape, (self.shape[1], 1))


@pytest.mark.parametrize("size", SIZES)
def test_a_weight_that_is_read_when_it_is_copied(size):
    lazy = Lazy(torch.zeros(size, size))
    with SimulatedGPU() as gpu:
        weight = torch.empty(size, size, device="cuda")
        weight.copy_(lazy)
        assert weight.is_cuda and weight.shape == (size, size)
    assert gpu.footprint.peak_tensors == 4 * size**2


def test_a_tensor_of_numbers_that_lie_on_the_card(gpu):
    number = torch.randn(3, device="cuda", dtype=torch.float16).sum()
    made = torch.tensor([[number, number], [number, number]], device="cuda")
    assert made.is_cuda and made.shape == (2, 2) and made.dtype == torch.float16
    assert torch.tensor([number, 2.0]).tolist() == [1, 2]


def test_a_number_of_the_host_weighs_tensors_of_the_card(gpu):
    x, weight = torch.zeros(8, device="cuda"), torch.tensor(0.1)
    assert x.lerp_(torch.ones(8, device="cuda"), weight) is x
    assert torch.lerp(x, x, weight).is_cuda
