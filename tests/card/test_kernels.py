"""Each CUDA rule against what PyTorch documents or does; outside the context nothing is changed."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.card.kernels import AUTOCAST_FP32, kernel_scratch
from memlab.card.rules import cuda_kernels
from memlab.gpus import ANY_CARD
from memlab.trace.tracer import Tracer


def kept(function, *shapes, dtype=torch.float32):
    """Bytes that `function` adds and keeps for backward, its output included."""
    inputs = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    with Tracer() as tracer:
        before = sum(x.nbytes for x in inputs)
        out = function(*inputs)
        levels = sum(entry.change for entry in tracer.entries)
    assert out is not None
    return levels, before


def test_dropout_keeps_a_mask_of_one_byte_an_element():
    levels, _ = kept(lambda x: F.dropout(x, 0.1), (1000,))
    assert levels == 4000 + 4000  # CPU: the output and a mask as wide as the input
    with cuda_kernels(ANY_CARD):
        levels, _ = kept(lambda x: F.dropout(x, 0.1), (1000,))
    assert levels == 4000 + 1000  # documented by torch.native_dropout: (output, bool mask)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout_that_does_nothing_keeps_nothing(p, training):
    x = torch.ones(10, requires_grad=True)
    with cuda_kernels(ANY_CARD):
        assert F.dropout(x, p, training) is x


def test_softmax_to_fp32_makes_no_copy_of_a_half_input():
    with FakeTensorMode():
        function = lambda x: F.softmax(x, -1, dtype=torch.float32)  # noqa: E731
        before, _ = kept(function, (10, 100), dtype=torch.float16)
        with cuda_kernels(ANY_CARD):
            now, _ = kept(function, (10, 100), dtype=torch.float16)
    assert now == 4000 and before >= now


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_gives_the_same_values(dtype):
    x = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    expected = F.softmax(x, -1)
    with cuda_kernels(ANY_CARD):
        torch.testing.assert_close(F.softmax(x, -1), expected)
        torch.testing.assert_close(F.log_softmax(x, -1).exp(), expected)


def autocast_dtype(function, *inputs):
    with FakeTensorMode(), cuda_kernels(ANY_CARD), torch.autocast("cpu", dtype=torch.float16):
        return function(*(torch.zeros(*shape, dtype=torch.float16) for shape in inputs)).dtype


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1),
        lambda x: F.log_softmax(x, -1),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: x.exp(),
        lambda x: x.pow(2),
        lambda x: torch.rsqrt(x),
        lambda x: x.sum(-1),
        lambda x: x.cumsum(-1),
        lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    ],
)
def test_autocast_runs_these_in_fp32_on_cuda(function):
    """torch.amp's documentation, "CUDA Ops that can autocast to float32"."""
    assert autocast_dtype(function, (4, 8)) == torch.float32


@pytest.mark.parametrize("function", [torch.nn.functional.gelu, torch.tanh, torch.relu])
def test_autocast_leaves_the_others_alone(function):
    assert autocast_dtype(function, (4, 8)) == torch.float16


def test_autocast_runs_products_in_half():
    assert autocast_dtype(lambda a, b: a.float() @ b.float(), (4, 8), (8, 4)) == torch.float16


def test_no_rule_overrides_one_that_the_cpu_has():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for operator in AUTOCAST_FP32:
        assert not has(f"aten::{operator}", "AutocastCPU"), operator


def test_softmax_backward_takes_a_temporary():
    grad, out = torch.zeros(10, 10), torch.zeros(10, 10)
    func = torch.ops.aten._softmax_backward_data.default
    assert kernel_scratch(func, (grad, out, -1, torch.float32)) == [grad.nbytes]
    assert kernel_scratch(torch.ops.aten.mul.Tensor, (grad, out)) == []


@pytest.mark.parametrize("key_heads", [4, 2])
def test_flash_backward_sums_the_gradient_of_the_query_in_fp32(key_heads):
    query = torch.zeros(2, 4, 130, 50, dtype=torch.bfloat16)
    key = torch.zeros(2, key_heads, 70, 50, dtype=torch.bfloat16)
    func = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    rows = 4 * 2 * 4 * 256  # lengths in 128
    expanded = [] if key_heads == 4 else 2 * [2 * 4 * 70 * 50 * 2]
    found = kernel_scratch(func, (query, query, key, key))
    assert found == [rows, 64 * rows, *expanded]  # head sizes in 32


def test_everything_is_put_back():
    x = torch.randn(100, requires_grad=True)
    with pytest.raises(KeyError):
        with cuda_kernels(ANY_CARD):
            raise KeyError
    assert "NativeDropout" not in type(F.dropout(x, 0.5).grad_fn).__name__
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.layer_norm(x.bfloat16(), (100,)).dtype == torch.bfloat16
