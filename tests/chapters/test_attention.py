"""Chapter 14: its tiles are exact, also of extreme scores."""

import pytest
import torch
import torch.nn.functional as F
from notebook import cells_of

CODE = "standard two-numbers extremes hbm flash-forward flash-backward flash-function"


page = cells_of("14-attention", f"imports settings {CODE} register")


deeper = cells_of("14-attention-deeper", "imports heads heads-mended")


def results(attend, tensors, dout, dtype):
    qkv = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    out = attend(*qkv)
    out.backward(dout.to(dtype))
    return [out.detach(), *(x.grad for x in qkv)]


def farthest(found, truth):
    return max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "queries, keys, values, tile",
    [
        (64, 64, 8, 16),
        (61, 61, 8, 16),
        (1, 1, 8, 16),
        (20, 20, 8, 64),
        (19, 33, 5, 8),
        (33, 19, 5, 8),
    ],
)
def test_tiles_give_attention_and_its_gradients(page, dtype, causal, queries, keys, values, tile):
    def flash(q, k, v):
        return page["Flash"].apply(q, k, v, causal, tile)

    def library(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    torch.manual_seed(queries)
    sizes = (queries, 8), (keys, 8), (keys, values), (queries, values)
    *tensors, dout = (torch.randn(2, 3, *size).to(dtype) for size in sizes)
    truth = results(library, tensors, dout, torch.float64)
    found = results(flash, tensors, dout, dtype)
    assert all(x.dtype == dtype for x in found)
    # In bf16 no farther from the truth than the library in the same format, but for a rounding.
    half = dtype == torch.bfloat16
    allowed = farthest(results(library, tensors, dout, dtype), truth) + 2**-8 if half else 1e-5
    assert farthest(found, truth) < allowed


@pytest.mark.parametrize("factor", [1e-20, 1e2, 1e4])
def test_tiles_survive_extreme_scores(page, factor):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 50, 8) for _ in range(3))
    q, k = q * factor, k * factor
    out, lse = page["flash_forward"](q, k, v, True, 8)
    scores = q.double() @ k.double().mT * 8**-0.5
    scores += torch.full((50, 50), -torch.inf).triu(1)
    torch.testing.assert_close(lse[..., 0].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
    gradients = page["flash_backward"](q, k, v, out, lse, v, True, 8)
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_running_softmax_is_the_softmax(page, size):
    largest = [[-3e38, 0.0, 3e38], [3e38, -3e38, 3e38], [-3e38, -3e38, -torch.inf]]
    for row in (*page["HARD"].values(), *map(torch.tensor, largest)):
        m, total = page["two_numbers"](row, size)
        found = m.double() + total.log().double()
        torch.testing.assert_close(found, row.double().logsumexp(0), rtol=1e-6, atol=1e-5)


def test_head_sizes_padded_with_zeros_change_nothing(deeper):
    for size in (5, 8, 50):
        odd = [torch.randn(1, 2, 32, size) for _ in range(3)]
        expected = F.scaled_dot_product_attention(*odd, is_causal=True)
        found = deeper["padded_heads"](*odd, is_causal=True)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "call",
    [{"mask": torch.ones(4, 4)}, {"mask": None, "dropout": 0.1}, {"mask": None, "scaling": 1.0}],
)
def test_the_registered_attention_refuses_what_it_ignores(page, call):
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="no mask, dropout or other scale"):
        page["from_scratch"](None, x, x, x, **call)
