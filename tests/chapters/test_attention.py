"""Chapter 14: its from-scratch FlashAttention is exact, its counts are right."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from notebook import Notebook
from torch.nn.attention.flex_attention import flex_attention

from memlab import Recipe, SimulatedGPU
from memlab.book.chapters import attention, kernels
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

CHAPTER = Notebook("14-attention")
PARTS = "imports standard two-numbers extremes flash-forward flash-function mask-trap"
CPU = torch.device("cpu")
DEEPER = Notebook("14-attention-deeper")


@pytest.fixture(scope="module")
def chapter():
    names = vars(attention) | vars(kernels) | CHAPTER.run(PARTS)
    for name in ("moved_by_tiles", "films"):
        names[name] = partial(names[name], names["flash_forward"])
    for name in ("traffic_of", "moved_by_standard"):
        names[name] = partial(names[name], names["standard"])
    return names


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports flex flex-run heads heads-mended")


def results(attend, tensors, dout, dtype):
    qkv = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    out = attend(*qkv)
    out.backward(dout.to(dtype))
    return [out.detach(), *(x.grad for x in qkv)]


def farthest(found, truth):
    return max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length, tile", [(64, 16), (61, 16), (1, 16), (37, 1), (20, 64)])
def test_tiles_give_attention_and_its_gradients(chapter, dtype, causal, length, tile):
    torch.manual_seed(length)
    *tensors, dout = (torch.randn(2, 3, length, 8).to(dtype) for _ in range(4))
    flash = lambda q, k, v: chapter["Flash"].apply(q, k, v, causal, tile)  # noqa: E731
    library = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    truth = results(library, tensors, dout, torch.float64)
    found = results(flash, tensors, dout, dtype)
    assert all(x.dtype == dtype for x in found)
    if dtype == torch.float32:
        assert farthest(found, truth) < 1e-5
    else:  # no farther from the truth than the standard in the same format, but for one rounding
        standard = lambda q, k, v: chapter["standard"](q, k, v, causal)  # noqa: E731
        allowed = farthest(results(standard, tensors, dout, dtype), truth)
        assert farthest(found, truth) <= allowed + 2**-8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(19, 33), (33, 19)])
def test_tiles_take_other_keys_than_queries_and_other_values_than_keys(
    chapter, queries, keys, causal
):
    torch.manual_seed(0)
    tensors = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 5)
    dout = torch.randn(2, 3, queries, 5)
    flash = lambda q, k, v: chapter["Flash"].apply(q, k, v, causal, 8)  # noqa: E731
    library = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    truth = results(library, tensors, dout, torch.float64)
    assert farthest(results(flash, tensors, dout, torch.float32), truth) < 1e-5


def test_tiles_survive_extreme_scores(chapter):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 50, 8) for _ in range(3))
    for factor in (1e-20, 1e2, 1e4):
        out, lse = chapter["flash_forward"](q * factor, k * factor, v, True, 8)
        scores = (q * factor).double() @ (k * factor).double().mT * 8**-0.5
        hidden = torch.ones(50, 50, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        torch.testing.assert_close(lse[..., 0].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
        gradients = chapter["flash_backward"](q * factor, k * factor, v, out, lse, v, True, 8)
        assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize(
    "shapes, tile",
    [
        (((1, 1, 4, 8), (1, 1, 4, 6), (1, 1, 4, 6)), 4),
        (((1, 1, 0, 8), (1, 1, 4, 8), (1, 1, 4, 8)), 4),
        (((1, 1, 4, 8), (1, 1, 0, 8), (1, 1, 0, 8)), 4),
        (((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 3, 8)), 4),
        (((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8)), 0),
    ],
)
def test_what_the_tiles_cannot_do_is_refused_in_one_line(chapter, shapes, tile):
    with pytest.raises(ValueError, match=f"tile is {tile}: allowed are equal head sizes") as error:
        chapter["Flash"].apply(*map(torch.zeros, shapes), False, tile)
    assert "\n" not in str(error.value)
    assert all(str(list(shape)) in str(error.value) for shape in shapes)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 4096])
def test_the_running_softmax_is_the_softmax(chapter, size):
    for name, row in chapter["ROWS"].items():
        m, total = chapter["two_numbers"](row, size)
        found = (m + total.log()).double()
        torch.testing.assert_close(found, row.double().logsumexp(0), rtol=1e-6, atol=1e-5)
        assert chapter["distances"](row, chapter["two_numbers"])[1] < 1e-6, name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_running_softmax_takes_the_largest_finite_numbers(chapter, size):
    for row in ([-3e38, 0.0, 3e38], [3e38, -3e38, 3e38], [-3e38, -3e38, -torch.inf]):
        m, total = chapter["two_numbers"](torch.tensor(row), size)
        assert m == torch.tensor(max(row)) and total == row.count(max(row))


def test_traffic_is_counted(chapter):
    n, d = 256, 64
    table = chapter["traffic_of"](n, d)
    square, side = 2 * n * n, 2 * n * d  # bytes in bf16
    assert list(table["read"]) == [2 * side, square, square, square + side]
    assert list(table["written"]) == [square, square, square, side]
    assert list(table["operations"]) == [2 * n * n * d, n * n, 5 * n * n, 2 * n * n * d]
    forward, backward = chapter["moved_by_tiles"](n, 128)
    numbers = 4 * n  # one fp32 a row
    assert forward == 2 * side + numbers + 2 * (n // 128) * side
    sums = 2 * side + numbers  # O and dO once, for D
    each = 2 * side + 2 * numbers + 2 * (2 * side)  # Q, dO, L, D, and dQ in fp32 there and back
    assert backward == sums + 4 * side + (n // 128) * each
    assert forward < 0.25 * sum(chapter["moved_by_standard"](n)[:1])


def test_the_film_shows_every_tile_once_and_none_in_the_future(chapter):
    triangle = [(i, j) for i in range(6) for j in range(i + 1)]
    forward, backward = chapter["films"](True)
    assert [tuple(moment[:2]) for moment in forward] == triangle
    down = sorted(triangle, key=lambda place: (place[1], place[0]))
    assert [tuple(moment[:2]) for moment in backward] == down
    for film, moved in zip(chapter["films"](False), chapter["moved_by_tiles"](768), strict=True):
        so_far = [moment[2] for moment in film]
        assert len(film) == 36 and so_far == sorted(so_far) and so_far[-1] == moved


def kept_bytes(attend, length):
    qkv = [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]
    with Tracer() as tracer:
        out = attend(*qkv)
        kept = sum(entry.change for entry in tracer.entries)
    assert out.requires_grad
    return kept


def test_the_square_is_kept_by_the_standard_and_not_by_tiles(chapter):
    tiled = lambda q, k, v: chapter["Flash"].apply(q, k, v, True, 32)  # noqa: E731
    grows = {}
    for name, way in (("standard", chapter["standard"]), ("tiles", tiled)):
        sizes = [kept_bytes(way, n) for n in (64, 128, 256)]
        grows[name] = (sizes[2] - sizes[1]) / (sizes[1] - sizes[0])
    assert grows["tiles"] == pytest.approx(2, abs=0.05)
    assert grows["standard"] > 3.5


def test_padding_costs_the_mask_and_the_repeated_keys():
    def route(padded):
        recipe = Recipe("llama-3.2-1b", precision="bf16", attention="sdpa").twin(padded=padded)
        with SimulatedGPU("A100-40GB") as gpu:
            training = Training(recipe, gpu.device, built_in=gpu.device)
            training.step()
        operations = {life.operation for life in gpu.footprint.timeline.lives}
        return {name.split("product_")[-1] for name in operations if "dot_product" in name}

    plain, padded = route(False), route(True)
    assert plain == {"flash_attention", "flash_attention_backward"}
    assert padded == {"efficient_attention", "efficient_attention_backward"}


def test_padding_on_the_right_needs_no_mask(chapter):
    q, k, v = chapter["inputs"](64, CPU, torch.float32, heads=2)
    real = torch.arange(64) < 50
    both = real & torch.ones(64, 64).tril().bool()
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=both)
    flagged = chapter["causal_by_flag"](q, k, v)
    torch.testing.assert_close(masked[:, :, real], flagged[:, :, real])


def test_head_sizes_padded_with_zeros_change_nothing(deeper):
    for size in (5, 8, 50):
        odd = [torch.randn(1, 2, 32, size) for _ in range(3)]
        expected = F.scaled_dot_product_attention(*odd, is_causal=True)
        found = deeper["padded_heads"](*odd, is_causal=True)
        torch.testing.assert_close(found, expected)


def test_a_rule_gives_the_masked_attention(deeper):
    q, k, v = (torch.randn(1, 1, 2048, 64) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_rule = flex_attention(q, k, v, block_mask=deeper["block_masks"]["packed"])
    i = torch.arange(2048)
    mask = deeper["documents"](0, 0, i[:, None], i)
    by_mask = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(by_rule, by_mask, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "call",
    [{"mask": torch.ones(4, 4)}, {"mask": None, "dropout": 0.1}, {"mask": None, "scaling": 1.0}],
)
def test_the_registered_attention_refuses_what_it_ignores(chapter, call):
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="no mask, dropout, other scale"):
        attention.by_name(chapter["Flash"].apply)(None, x, x, x, **call)
