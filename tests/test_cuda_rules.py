"""Each CUDA rule against what PyTorch documents or does; outside the context nothing is changed."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.cuda_rules import AUTOCAST_FP32, cuda_kernels, kernel_scratch, sdpa_route
from memlab.tracer import Tracer


def kept(function, *shapes, dtype=torch.float32):
    """Bytes that `function` adds and keeps for backward, its output included."""
    inputs = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    with Tracer() as tracer:
        before = sum(x.nbytes for x in inputs)
        out = function(*inputs)
        levels = sum(event[0] for event in tracer.events)
    assert out is not None
    return levels, before


def test_dropout_keeps_a_mask_of_one_byte_an_element():
    levels, _ = kept(lambda x: F.dropout(x, 0.1), (1000,))
    assert levels == 4000 + 4000  # CPU: the output and a mask as wide as the input
    with cuda_kernels():
        levels, _ = kept(lambda x: F.dropout(x, 0.1), (1000,))
    assert levels == 4000 + 1000  # documented by torch.native_dropout: (output, bool mask)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout_that_does_nothing_keeps_nothing(p, training):
    x = torch.ones(10, requires_grad=True)
    with cuda_kernels():
        assert F.dropout(x, p, training) is x


def test_softmax_to_fp32_makes_no_copy_of_a_half_input():
    with FakeTensorMode():
        function = lambda x: F.softmax(x, -1, dtype=torch.float32)  # noqa: E731
        before, _ = kept(function, (10, 100), dtype=torch.float16)
        with cuda_kernels():
            now, _ = kept(function, (10, 100), dtype=torch.float16)
    assert now == 4000 and before >= now


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_gives_the_same_values(dtype):
    x = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    expected = F.softmax(x, -1)
    with cuda_kernels():
        torch.testing.assert_close(F.softmax(x, -1), expected)
        torch.testing.assert_close(F.log_softmax(x, -1).exp(), expected)


@pytest.mark.parametrize(
    ("dtype", "mask", "head", "route"),
    [
        (torch.float16, None, 64, "flash"),
        (torch.bfloat16, None, 256, "flash"),
        (torch.bfloat16, None, 320, "efficient"),
        (torch.float32, None, 64, "efficient"),
        (torch.float16, torch.ones(8, 8), 64, "efficient"),
    ],
)
def test_attention_takes_the_route_of_the_documentation(dtype, mask, head, route):
    query = torch.zeros(1, 2, 8, head, dtype=dtype)
    assert sdpa_route(query, query, mask, 0.0) == route


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_is_linear_in_length_and_math_is_quadratic(dtype):
    def bytes_kept(length, backend):
        with FakeTensorMode(), cuda_kernels(backend):
            shape = (1, 4, length, 64)
            levels, _ = kept(F.scaled_dot_product_attention, shape, shape, shape, dtype=dtype)
        return levels

    assert bytes_kept(2048, None) / bytes_kept(1024, None) == pytest.approx(2, rel=0.01)
    assert bytes_kept(2048, "math") / bytes_kept(1024, "math") > 3.3


@pytest.mark.parametrize("columns, kept_columns", [(504, 504), (505, 512), (509, 512)])
def test_a_mask_is_kept_in_rows_of_a_multiple_of_eight(columns, kept_columns):
    with FakeTensorMode(), cuda_kernels():
        q, k, v = (torch.zeros(2, 4, columns, 64, requires_grad=True) for _ in range(3))
        hide = torch.zeros(2, 1, columns, columns, dtype=torch.bool)
        with Tracer() as tracer:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=hide)
        sizes = {event[0] for event in tracer.events}
    assert out.shape == (2, 4, columns, 64)
    assert 2 * columns * kept_columns * 4 in sizes


def test_attention_with_fewer_key_heads_repeats_them():
    with FakeTensorMode(), cuda_kernels():
        query = torch.zeros(1, 8, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        key = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
        out = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        assert out.shape == query.shape


def autocast_dtype(function, *inputs):
    with FakeTensorMode(), cuda_kernels(), torch.autocast("cpu", dtype=torch.float16):
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
    assert kernel_scratch(func, (grad, out, -1, torch.float32)) == grad.nbytes
    assert kernel_scratch(torch.ops.aten.mul.Tensor, (grad, out)) == 0


def test_everything_is_put_back():
    x = torch.randn(100, requires_grad=True)
    with pytest.raises(KeyError):
        with cuda_kernels():
            raise KeyError
    assert "NativeDropout" not in type(F.dropout(x, 0.5).grad_fn).__name__
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.layer_norm(x.bfloat16(), (100,)).dtype == torch.bfloat16
