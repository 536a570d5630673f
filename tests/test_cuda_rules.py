"""Each CUDA rule against what PyTorch documents or does; outside the context nothing is changed."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from memlab import SimulatedGPU
from memlab.cuda_rules import (
    AUTOCAST_FP32,
    cuda_kernels,
    kernel_scratch,
    sdpa_refusals,
    sdpa_route,
)
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


HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
MASK = torch.ones(8, 8)


@pytest.mark.parametrize(
    ("dtype", "head", "call", "route"),
    [
        (HALF, 64, {}, "flash"),
        (BF16, 256, {}, "flash"),
        (BF16, 320, {}, "efficient"),
        (FULL, 64, {}, "efficient"),
        (HALF, 64, {"attn_mask": MASK}, "efficient"),
        (HALF, 64, {"dropout_p": 0.1}, "flash"),
        (HALF, 50, {}, "flash"),
        (HALF, 50, {"attn_mask": MASK}, "math"),
        (FULL, 50, {}, "math"),
        (torch.float64, 64, {}, "math"),
        (HALF, 64, {"capability": (7, 5)}, "efficient"),
        (BF16, 64, {"capability": (7, 5)}, "math"),
        (FULL, 50, {"capability": (7, 5)}, "efficient"),
        (BF16, 200, {"capability": (8, 6)}, "efficient"),
        (BF16, 200, {"capability": (9, 0)}, "flash"),
        (BF16, 256, {"capability": (8, 9), "dropout_p": 0.1}, "efficient"),
    ],
)
def test_attention_takes_the_route_of_the_source(dtype, head, call, route):
    query = torch.zeros(1, 2, 8, head, dtype=dtype, requires_grad=True)
    assert sdpa_route(query, query, query, **call) == route


def test_shapes_decide_the_route():
    make = lambda *shape: torch.zeros(shape, dtype=BF16)  # noqa: E731
    query, long = make(1, 8, 16, 64), make(1, 8, 32, 64)
    assert sdpa_route(query[0], query[0], query[0]) == "math"
    assert sdpa_route(query, long, long) == "flash"
    assert sdpa_route(query, long, long, is_causal=True) == "efficient"
    assert sdpa_route(query, query, make(1, 8, 16, 32)) == "efficient"
    crossed = query.mT.contiguous().mT
    assert sdpa_route(crossed, query, query) == "math"
    few = make(1, 2, 16, 64)
    assert sdpa_route(query, few, few) == "math"
    assert sdpa_route(query, few, few, enable_gqa=True) == "flash"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks the card itself")
@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("head", [50, 64, 256, 320])
@pytest.mark.parametrize("mask", [None, MASK])
def test_routes_are_those_of_the_card(dtype, head, mask):
    query = torch.zeros(1, 2, 8, head, dtype=dtype, device="cuda")
    mask = mask if mask is None else mask.to(query)
    parameters = torch.backends.cuda.SDPAParams(query, query, query, mask, 0.0, False, False)
    capability = torch.cuda.get_device_capability()
    for route, allows in (
        ("flash", torch.backends.cuda.can_use_flash_attention),
        ("efficient", torch.backends.cuda.can_use_efficient_attention),
    ):
        refused = sdpa_refusals(route, query, query, query, attn_mask=mask, capability=capability)
        assert allows(parameters) == (not refused)


def test_each_refusal_says_what_is_given_and_what_is_allowed():
    query = torch.zeros(1, 2, 8, 300, dtype=BF16)
    reasons = sdpa_refusals("flash", query, query, query, attn_mask=MASK, capability=(7, 5))
    assert reasons == [
        "dtypes are bfloat16, bfloat16, bfloat16: allowed are float16",
        "compute capability is 7.5: allowed are 8.0 and later",
        "attn_mask is given: allowed are None and is_causal",
        "head sizes are (300, 300, 300): allowed are equal ones up to 256",
    ]
    with pytest.raises(ValueError, match="route is 'fast': allowed are flash, efficient, math"):
        sdpa_refusals("fast", query, query, query)


def test_the_switch_of_pytorch_is_obeyed():
    query = torch.zeros(1, 2, 8, 64, dtype=BF16)
    with sdpa_kernel(SDPBackend.MATH):
        assert sdpa_route(query, query, query) == "math"
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert sdpa_route(query, query, query) == "efficient"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with pytest.warns(UserWarning, match="flash attention not used because: attn_mask"):
            with pytest.raises(RuntimeError, match="No available kernel"):
                sdpa_route(query, query, query, attn_mask=MASK)


def test_a_simulated_card_takes_its_own_route():
    def operations(card):
        with SimulatedGPU(card) as gpu:
            query = torch.zeros(1, 2, 64, 64, dtype=HALF, device="cuda", requires_grad=True)
            F.scaled_dot_product_attention(query, query, query)
        return {life.operation for life in gpu.footprint.timeline.lives}

    assert "aten._scaled_dot_product_efficient_attention" in operations("T4")
    assert "aten._scaled_dot_product_flash_attention" in operations("A100-40GB")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_is_linear_in_length_and_math_is_quadratic(dtype):
    def bytes_kept(length, *backends):
        with FakeTensorMode(), cuda_kernels(), sdpa_kernel(list(backends)):
            shape = (1, 4, length, 64)
            levels, _ = kept(F.scaled_dot_product_attention, shape, shape, shape, dtype=dtype)
        return levels

    fused = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    assert bytes_kept(2048, *fused) / bytes_kept(1024, *fused) == pytest.approx(2, rel=0.01)
    math = SDPBackend.MATH
    assert bytes_kept(2048, math) / bytes_kept(1024, math) > 3.3


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


@pytest.mark.parametrize("dtype, repeated", [(BF16, False), (FULL, True)])
def test_flash_takes_fewer_key_heads_as_they_are(dtype, repeated):
    with FakeTensorMode(), cuda_kernels():
        query = torch.zeros(1, 8, 16, 64, dtype=dtype, requires_grad=True)
        key = torch.zeros(1, 2, 16, 64, dtype=dtype, requires_grad=True)
        with Tracer() as tracer:
            out = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        sizes = [event[0] for event in tracer.events]
    assert out.shape == query.shape
    assert sizes.count(query.nbytes) == (3 if repeated else 1)  # the output, and two copies


def test_flash_pads_the_head_size_to_a_multiple_of_eight():
    with FakeTensorMode(), cuda_kernels():
        query = torch.zeros(1, 2, 128, 50, dtype=BF16, requires_grad=True)
        with Tracer() as tracer:
            out = F.scaled_dot_product_attention(query, query, query)
    assert out.shape == query.shape
    padded = 2 * 128 * 56 * 2
    assert [event[0] for event in tracer.events].count(padded) == 4


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


@pytest.mark.parametrize("key_heads", [4, 2])
def test_flash_backward_sums_the_gradient_of_the_query_in_fp32(key_heads):
    query = torch.zeros(2, 4, 130, 50, dtype=BF16)
    key = torch.zeros(2, key_heads, 70, 50, dtype=BF16)
    func = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    sums = 4 * 2 * 4 * 256 * (64 + 1)  # lengths in 128, head sizes in 32, one row sum
    expanded = 0 if key_heads == 4 else 2 * (2 * 4 * 70 * 50 * 2)
    assert kernel_scratch(func, (query, query, key, key)) == sums + expanded


def test_everything_is_put_back():
    x = torch.randn(100, requires_grad=True)
    with pytest.raises(KeyError):
        with cuda_kernels():
            raise KeyError
    assert "NativeDropout" not in type(F.dropout(x, 0.5).grad_fn).__name__
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.layer_norm(x.bfloat16(), (100,)).dtype == torch.bfloat16
