"""Names by which code comes to the card, beside `.to` and `.cuda`."""

import copy

import pytest
import torch
from helpers import allocated, most
from torch.nn import functional as F
from torch.utils.data import DataLoader

from memlab import SimulatedGPU


def test_type_and_type_as_move(t4):
    half = torch.zeros(2, device="cuda", dtype=torch.half)
    for made in (
        torch.arange(3).type_as(half),
        torch.ones(2**20).type_as(half),
        torch.ones(3).type("torch.cuda.HalfTensor"),
        torch.ones(3, device="cuda").type(torch.half),
    ):
        assert (made.device, made.dtype) == (torch.device("cuda", 0), torch.half)
    assert half.type() == "torch.cuda.HalfTensor" and torch.ones(1).type() == "torch.FloatTensor"
    assert half.type("torch.DoubleTensor").device == torch.device("cpu")
    assert torch.ones(3).type(torch.LongTensor).dtype == torch.int64
    x = torch.ones(3, requires_grad=True)
    (x.type_as(half) * 2).sum().backward()
    assert x.grad.device == torch.device("cpu")


def test_types_from_before_there_were_dtypes_make_tensors_on_the_card(t4):
    made = torch.cuda.FloatTensor([1.0, 2.0])
    assert made.is_cuda and made.shape == (2,)
    assert torch.cuda.LongTensor(2, 3).dtype == torch.int64
    assert isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)
    assert made.new([3.0]).is_cuda and made.new(4, 5).shape == (4, 5)
    try:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        assert torch.ones(2).is_cuda
        with pytest.raises(TypeError, match="'torch.Tensors' is not a tensor type"):
            torch.set_default_tensor_type("torch.Tensors")
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert not torch.ones(2).is_cuda


MAKE = {
    "tensor": lambda: torch.tensor([64, 64], device="cuda"),
    "to": lambda: torch.ones(2).to("cuda"),
    "to as a tensor": lambda: torch.ones(2).to(tensor=torch.ones(1, device="cuda")),
    "index": lambda: torch.tensor([8.0, 16.0]).cuda()[0],
}


@pytest.mark.parametrize("name", MAKE)
def test_tensors_of_inference_mode_lie_where_they_were_asked_to(t4, name):
    with torch.inference_mode():
        assert MAKE[name]().is_cuda


def test_inference_mode_takes_what_no_grad_takes():
    def peak(mode):
        with SimulatedGPU("T4") as gpu, mode():
            layer = torch.nn.Linear(64, 64).cuda().half()
            x = layer(torch.ones(2, 4, 300, 64, device="cuda", dtype=torch.half))
            mask = torch.ones(300, 300, dtype=torch.bool, device="cuda")
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask).softmax(-1, dtype=torch.float32)
            assert not x.requires_grad
        return gpu.footprint.peak_allocated

    assert peak(torch.inference_mode) == peak(torch.no_grad)


def test_pinned_memory_is_asked_for_and_said(t4):
    for made in (
        torch.tensor(5, dtype=torch.int32, pin_memory=True),
        torch.tensor([1.0], pin_memory=True),
        torch.empty_like(torch.ones(3), pin_memory=True),
        torch.randn(3, pin_memory=True),
        torch.ones(2**20).pin_memory(),
        *DataLoader(torch.ones(1, 3), pin_memory=True),
    ):
        assert made.is_pinned() and not made.is_cuda
        assert made.cuda(non_blocking=True).is_cuda
    plain = torch.ones(3)
    assert plain.pin_memory().is_pinned() and not plain.is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        plain.cuda().pin_memory()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_from_before_a_move_run_after_it(register):
    """An optimizer that is made before the model moves, as torchao's on the host, asks for one."""
    called = []
    outside = torch.nn.Linear(4, 2)
    getattr(outside.weight, register)(lambda _: called.append("outside"))
    with SimulatedGPU("L4"):
        inside = torch.nn.Linear(4, 2)
        handle = getattr(inside.weight, register)(lambda _: called.append("inside"))
        for model in (inside, outside):
            model.cuda()(torch.ones(1, 4, device="cuda")).sum().backward()
        assert called == ["inside", "outside"]
        handle.remove()
        inside(torch.ones(1, 4, device="cuda")).sum().backward()
    assert called == ["inside", "outside"]
    outside(torch.ones(1, 4)).sum().backward()
    assert called == ["inside", "outside", "outside"]


def test_layers_that_learn_their_width_from_the_first_batch_are_made_where_they_were_moved():
    def layers():
        return torch.nn.Sequential(
            torch.nn.LazyConv2d(8, 3),
            torch.nn.LazyBatchNorm2d(),
            torch.nn.Flatten(),
            torch.nn.LazyLinear(4),
        )

    with SimulatedGPU() as gpu:
        model = layers().cuda()
        assert "Lazy" in repr(model) and allocated() < 2**11
        model(torch.randn(2, 3, 16, 16, device="cuda")).sum().backward()
        footprint = gpu.footprint
        assert all(p.is_cuda for p in (*model.parameters(), *model.buffers()))
        assert model[3].weight.shape == (4, 8 * 14 * 14)
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert most(footprint, "parameters") == weights
    with SimulatedGPU():
        assert layers().cuda().cpu()(torch.randn(2, 3, 16, 16)).is_cpu


@pytest.mark.parametrize("width", [64, 2048], ids=["with data", "without"])
def test_gradients_go_along_with_their_module(t4, width):
    layer = torch.nn.Linear(width, width, bias=False)
    layer(torch.randn(4, width)).sum().backward()
    assert layer.cuda().weight.grad.is_cuda
    held = allocated()
    assert layer.half().weight.grad.dtype == torch.half
    assert allocated() == held // 2
    assert layer.cpu().weight.grad.device == torch.device("cpu")
    assert allocated() == 0


@pytest.mark.parametrize("width", [64, 2048], ids=["with data", "without"])
def test_a_copied_module_has_no_gradients_a_copied_tensor_has(t4, width):
    layer = torch.nn.Linear(width, width, bias=False, device="cuda")
    leaf = torch.ones(width, width, device="cuda", requires_grad=True)
    (layer.weight * leaf).sum().backward()
    twin = copy.deepcopy(layer)
    assert twin.weight.grad is None and twin.weight.requires_grad
    assert isinstance(twin.weight, torch.nn.Parameter) and twin.weight.is_cuda
    assert copy.deepcopy(leaf).grad is not None
    tied = torch.nn.ModuleList([layer, torch.nn.Linear(1, 1)])
    tied[1].weight = layer.weight
    twins = copy.deepcopy(tied)
    assert twins[0].weight is twins[1].weight


def to_the_card_and_back(model):
    model.to("cuda").to("cpu")


def to_the_card_again(model):
    model.cuda().cpu().cuda().half()


def one_part_only(model):
    model[0].cuda().cpu()
    model[1].cuda()


def by_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.cuda()
        parameter.data = parameter.data.cpu()


@pytest.mark.parametrize("width", [8, 1024], ids=["with data", "without"])
@pytest.mark.parametrize("move", [to_the_card_and_back, to_the_card_again, one_part_only, by_data])
def test_a_model_from_outside_has_its_data_again_wherever_it_was_moved_last(move, width):
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
    model[1].running_mean.normal_()
    model.append(torch.nn.Linear(width, width))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters())
    before = copy.deepcopy(model.state_dict())
    with SimulatedGPU():
        move(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model[2].weight is model[0].weight is optimizer.param_groups[0]["params"][0]


def test_what_the_host_computes_of_a_model_from_outside_stays():
    model = torch.nn.BatchNorm1d(4)
    model.running_mean.normal_()
    values = model.running_mean.half()
    with SimulatedGPU():
        model.half()
        assert model.running_mean.equal(values)
        model.cuda().cpu()
    assert model.running_mean.equal(values) and model.weight.dtype == torch.half


def test_a_model_made_inside_keeps_the_weights_that_it_loaded_on_the_host():
    loaded = {"weight": torch.randn(2, 2)}
    with SimulatedGPU():
        layer = torch.nn.Linear(2, 2, bias=False).cuda().cpu().cuda().cpu()
        layer.load_state_dict(loaded)
    assert layer.weight.equal(loaded["weight"])


@pytest.mark.parametrize("width", [4, 256], ids=["with data", "without"])
def test_moves_give_the_memory_format_that_was_asked_for_or_keep_it(t4, width):
    x, last = torch.randn(1, 8, width, width), torch.channels_last
    turned = x.to(memory_format=last)
    for tensor in (x.to("cuda", memory_format=last), x.cuda(memory_format=last), turned.cuda()):
        assert tensor.stride() == turned.stride()
        assert tensor.cpu().stride() == tensor.to("cpu", torch.half).stride() == turned.stride()
        assert tensor.to("cpu", memory_format=torch.contiguous_format).is_contiguous()
        assert tensor.cpu(memory_format=torch.contiguous_format).is_contiguous()
    y = x.cuda()
    assert y.to("cpu", memory_format=last).stride() == turned.stride()
    assert y.cpu(memory_format=last).stride() == turned.stride()


def test_only_what_is_not_contiguous_is_copied_on_the_card_before_it_leaves(gpu):
    x = torch.randn(8, 64, 64, 64, device="cuda")
    turned = x.to(memory_format=torch.channels_last)

    def taken(leave):
        gpu.reset_peak()
        before = allocated()
        leave()
        return torch.cuda.max_memory_allocated() - before

    assert taken(lambda: turned.cpu()) == 0
    assert taken(lambda: x.to("cpu", memory_format=torch.channels_last)) == 0
    assert taken(lambda: turned.to("cpu", memory_format=torch.contiguous_format)) == x.nbytes
    assert taken(lambda: turned.to("cpu", torch.half)) == x.nbytes
    assert taken(lambda: torch.empty(64, 64, 64, 8).T.copy_(x)) == 0
    assert taken(lambda: torch.empty(8, 64, 64, 64).copy_(x[:1])) == x.nbytes
