"""Routes of attention against PyTorch's source, and what each kernel keeps in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from memlab import SimulatedGPU
from memlab.card.kernels.rules import cuda_kernels
from memlab.card.kernels.sdpa import model_routes, sdpa_refusals, sdpa_route
from memlab.gpus import ANY_CARD
from memlab.trace.tracer import Tracer

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


@pytest.mark.parametrize(
    ("dtype", "shares_keys", "capability", "routes"),
    [
        (HALF, False, (7, 5), ("efficient", "efficient")),
        (HALF, True, (7, 5), ("math", "efficient")),
        (FULL, True, (7, 0), ("math", "efficient")),
        (HALF, False, (8, 0), ("flash", "efficient")),
        (BF16, True, (8, 0), ("flash", "efficient")),
        (FULL, False, (8, 0), ("efficient", "efficient")),
        (FULL, True, (9, 0), ("math", "efficient")),
    ],
)
def test_a_models_routes_without_and_with_a_mask(
    attention_of_2_13, dtype, shares_keys, capability, routes
):
    assert model_routes(dtype, shares_keys, capability) == routes


def test_a_simulated_card_takes_its_own_route():
    def operations(card):
        with SimulatedGPU(card) as gpu:
            query = torch.zeros(1, 2, 64, 64, dtype=HALF, device="cuda", requires_grad=True)
            F.scaled_dot_product_attention(query, query, query)
        return {life.operation for life in gpu.footprint.timeline.lives}

    assert "aten._scaled_dot_product_efficient_attention" in operations("T4")
    assert "aten._scaled_dot_product_flash_attention" in operations("A100-40GB")


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
@pytest.mark.parametrize("key_shape", [(1, 4), (1, 2), (2, 4)])
def test_routes_are_those_of_the_card(dtype, head, mask, key_shape):
    query = torch.zeros(1, 4, 8, head, dtype=dtype, device="cuda")
    key = torch.zeros(*key_shape, 8, head, dtype=dtype, device="cuda")
    mask = mask if mask is None else mask.to(query)
    parameters = torch.backends.cuda.SDPAParams(query, key, key, mask, 0.0, False, True)
    capability = torch.cuda.get_device_capability()
    for route, allows in (
        ("flash", torch.backends.cuda.can_use_flash_attention),
        ("efficient", torch.backends.cuda.can_use_efficient_attention),
    ):
        call = {"attn_mask": mask, "enable_gqa": True, "capability": capability}
        refused = sdpa_refusals(route, query, key, key, **call)
        assert allows(parameters) == (not refused)


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


# The words of PyTorch 2.13's documentation: shared key heads work for flash and math only.
@pytest.mark.parametrize(
    ("dtype", "call"),
    [(HALF, {"capability": (7, 5)}), (FULL, {}), (BF16, {"attn_mask": torch.ones(16, 16)})],
    ids=["T4", "fp32", "mask"],
)
def test_shared_key_heads_without_flash_take_math(monkeypatch, dtype, call):
    monkeypatch.setattr("memlab.card.kernels.sdpa.SHARES_KEYS", {"flash"})
    query, key = (torch.zeros(1, heads, 16, 64, dtype=dtype) for heads in (8, 2))
    assert sdpa_route(query, key, key, enable_gqa=True, **call) == "math"
    refused = sdpa_refusals("efficient", query, key, key, enable_gqa=True, **call)
    assert refused == ["heads are (8, 2, 2): allowed are equal ones"]
    repeated = key.repeat_interleave(4, dim=1)
    assert sdpa_route(query, repeated, repeated, **call) == "efficient"
    monkeypatch.setattr("memlab.card.kernels.sdpa.SHARES_KEYS", {"flash", "efficient"})
    assert sdpa_route(query, key, key, enable_gqa=True, **call) == "efficient"
    three = torch.zeros(1, 3, 16, 64, dtype=dtype)
    refused = sdpa_refusals("efficient", query, three, three, enable_gqa=True, **call)
    assert refused == ["heads are (8, 3, 3): allowed are key heads that divide the query's"]


def test_other_batches_and_masks_that_are_not_contiguous_take_math():
    query, one = torch.zeros(2, 4, 8, 64, dtype=BF16), torch.zeros(1, 4, 8, 64, dtype=BF16)
    assert sdpa_route(query, one, one) == "math"
    refused = sdpa_refusals("flash", query, one, one)
    assert refused == ["batch sizes are (2, 1, 1): allowed are equal ones"]
    columns = torch.ones(8, 1).expand(8, 8)  # one number for each row
    assert sdpa_route(query, query, query, attn_mask=columns) == "math"
    assert sdpa_route(query, query, query, attn_mask=columns.clone()) == "efficient"


def made(shape, dtype, heads=None, mask=None, **call):
    """The bytes of each tensor that attention makes on any card and keeps for the backward pass.

    heads: of the keys, where they are fewer. mask: the shape of one.
    """
    with FakeTensorMode(), cuda_kernels(ANY_CARD):
        query = torch.zeros(shape, dtype=dtype, requires_grad=True)
        key = query if heads is None else query[:, :heads].detach().requires_grad_()
        call |= {"attn_mask": torch.zeros(mask, dtype=torch.bool)} if mask else {}
        with Tracer() as tracer:
            out = F.scaled_dot_product_attention(query, key, key, **call)
            sizes = [entry.change for entry in tracer.entries]
    assert out.shape == shape and out.requires_grad
    return sizes


@pytest.mark.parametrize("dtype", [FULL, BF16])
def test_fused_attention_is_linear_in_length_and_math_is_quadratic(dtype):
    def growth(*backends):
        with sdpa_kernel(list(backends)):
            long, short = (sum(made((1, 4, length, 64), dtype)) for length in (2048, 1024))
        return long / short

    fused = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    assert growth(*fused) == pytest.approx(2, rel=0.01)
    assert growth(SDPBackend.MATH) > 3.3


@pytest.mark.parametrize("columns, kept_columns", [(504, 504), (505, 512), (509, 512)])
def test_a_mask_is_kept_in_rows_of_a_multiple_of_eight(columns, kept_columns):
    sizes = made((2, 4, columns, 64), FULL, mask=(2, 1, columns, columns))
    assert 2 * columns * kept_columns * 4 in sizes


def test_flash_takes_fewer_key_heads_as_they_are():
    sizes = made((1, 8, 16, 64), BF16, heads=2, enable_gqa=True)
    assert sizes.count(8 * 16 * 64 * 2) == 1  # the output; no key is repeated


def test_flash_pads_the_head_size_to_a_multiple_of_eight():
    assert made((1, 2, 128, 50), BF16).count(2 * 128 * 56 * 2) == 4
