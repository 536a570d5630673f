"""Chapter 14: its from-scratch FlashAttention is exact, its counts right, its verdict stands."""

import gc
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from notebook import Notebook
from torch.nn.attention.flex_attention import flex_attention

from memlab import Recipe, SimulatedGPU, models
from memlab.book.chapters import attention, kernels
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

CHAPTER = Notebook("14-attention")
PARTS = """imports standard two-numbers extremes flash-forward flash-function exact ways
    measure-run see mask-trap exercise-3-code"""
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


def test_the_plain_quotient_is_not_a_number_on_four_rows(chapter):
    off = [chapter["distances"](row, chapter["two_numbers"])[0] for row in chapter["ROWS"].values()]
    assert np.isnan(off).sum() == 4


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


def test_with_a_causal_mask_the_standard_moves_more(chapter):
    """The panel sets each pass beside the standard's with the same mask."""
    plain, causal = chapter["moved_by_standard"](256), chapter["moved_by_standard"](256, True)
    assert all(b > a for a, b in zip(plain, causal, strict=True))
    _, standard = chapter["player_data"](chapter["standard"], chapter["flash_forward"])
    same = [*chapter["moved_by_standard"](768), *chapter["moved_by_standard"](768, True)]
    assert list(standard.values()) == same


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


def test_measured_memory_is_a_square_with_a_matrix_and_a_line_without(chapter):
    """f(2n) - 2 f(n) is a constant where f is a line; of a square it leaves a square."""
    gc.freeze()  # the Meter collects garbage; what is imported is none
    for name, way in chapter["LIVE"].items():
        if name == "our tiles":
            way = lambda q, k, v: chapter["Flash"].apply(q, k, v, False, 32)  # noqa: E731
        half, whole, double, fourfold = (
            chapter["measured"](way, n, CPU) for n in (64, 128, 256, 512)
        )
        rest = whole - 2 * half, double - 2 * whole, fourfold - 2 * double
        if name in ("three lines", "math"):
            assert rest[2] / rest[1] == pytest.approx(4, rel=0.01), name
            assert rest[2] >= 2 * 4 * (512**2 - 2 * 256**2), name  # two matrices in fp32 or more
        else:
            assert abs(rest[2] - rest[1]) < 0.01 * fourfold, name
    gc.unfreeze()


def test_peaks_are_predicted_to_the_byte(chapter):
    gc.freeze()  # the Meter collects garbage; what is imported is none
    for name, way in chapter["LIVE"].items():
        if name == "our tiles":
            way = lambda q, k, v: chapter["Flash"].apply(q, k, v, False, 64)  # noqa: E731
        found = chapter["measured"](way, 256, CPU)
        guess = chapter["predicted"](way, 256, CPU)
        assert guess == pytest.approx(found, abs=64), name
    gc.unfreeze()


def test_peaks_of_the_four_ways_at_full_size(chapter):
    grows = {}
    for name, way in chapter["WAYS"].items():
        sizes = [chapter["simulated"](way, n).peak_tensors for n in (8192, 16384)]
        grows[name] = sizes[1] / sizes[0]
    assert all(3.8 < grows[name] < 4.1 for name in ("three lines", "math"))
    assert all(1.9 < grows[name] < 2.1 for name in ("memory-efficient", "flash"))


def test_a_mask_turns_flash_off_and_the_flag_fixes_it(chapter):
    masked, small = chapter["on_card"](chapter["causal_by_mask"], 1024)
    flagged, smaller = chapter["on_card"](chapter["causal_by_flag"], 1024)
    assert (masked, flagged) == ("EfficientAttention", "FlashAttention")
    tensors = chapter["inputs"](128, "cpu", torch.float32, heads=2)
    by_mask, by_flag = (chapter[f"causal_by_{how}"](*tensors) for how in ("mask", "flag"))
    torch.testing.assert_close(by_mask, by_flag)
    with SimulatedGPU("A100-40GB"):
        qkv = chapter["inputs"](64, "cuda", torch.bfloat16)
        assert "attn_mask is given" in chapter["forbidden"](chapter["causal_by_mask"], *qkv)[0]
        assert chapter["forbidden"](chapter["causal_by_flag"], *qkv)[0].startswith("taken")
    with SimulatedGPU("T4"):
        qkv = chapter["inputs"](64, "cuda", torch.float16)
        assert "capability is 7.5" in chapter["forbidden"](chapter["causal_by_flag"], *qkv)[0]


def test_padding_costs_the_mask_and_the_repeated_keys(chapter):
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


def test_the_card_decides_the_kernel():
    routes = kernels.routes()
    assert routes.loc["fp16"].tolist() == ["efficient", "flash", "cuDNN", "cuDNN"]
    assert routes.loc["bf16"].tolist() == ["math", "flash", "cuDNN", "cuDNN"]
    assert routes.loc["fp16, any mask", "H100"] == "cuDNN"
    assert (
        routes.loc["fp16, dropout", "H100"] == routes.loc["fp16, head size 50", "H100"] == "flash"
    )


def test_patterns_of_tiles(deeper):
    some = {n: b.to_dense()[0, 0].numpy() for n, b in deeper["block_masks"].items()}
    assert some["causal"].sum() == 16 * 17 // 2
    i, j = np.indices((16, 16))
    assert (some["window of 512"] == ((i >= j) & (i - j <= 4))).all()
    assert some["packed"].sum() < some["causal"].sum()
    drawn = kernels.tiles_figure(deeper["block_masks"]).axes
    assert [len(ax.patches) for ax in drawn] == [one.sum() for one in some.values()]


def test_a_rule_gives_the_masked_attention(deeper):
    q, k, v = (torch.randn(1, 1, 2048, 64) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_rule = flex_attention(q, k, v, block_mask=deeper["block_masks"]["packed"])
    i = torch.arange(2048)
    mask = deeper["documents"](0, 0, i[:, None], i)
    by_mask = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(by_rule, by_mask, rtol=2e-3, atol=2e-3)


def test_three_attentions_learn_the_same(chapter):
    losses = chapter["learned"](chapter["Flash"].apply, CPU, seed=1, steps=6)
    apart, fallen = chapter["apart_and_fallen"](losses)
    assert list(losses) == ["eager", "sdpa", "from_scratch"] and apart < 2e-3 < 0.2 < fallen


@pytest.mark.parametrize(
    "call",
    [{"mask": torch.ones(4, 4)}, {"mask": None, "dropout": 0.1}, {"mask": None, "scaling": 1.0}],
)
def test_the_registered_attention_refuses_what_it_ignores(chapter, call):
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="no mask, dropout, other scale"):
        attention.by_name(chapter["Flash"].apply)(None, x, x, x, **call)


@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="the kernel shares keys since 2.14")
def test_shared_keys_cost_a_t4_the_fused_kernel_and_repeated_ones_do_not(chapter, capsys):
    CHAPTER.run("gqa-model gqa-model-run", chapter)
    before, after = capsys.readouterr().out.splitlines()
    assert before.endswith("out of memory") and "fits" in after


@pytest.mark.parametrize("number, wrong", [(1, 8), (2, 1024), (3, 1)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


@pytest.mark.parametrize(
    "square, error, word",
    [(2.0, 0, "holds with a condition"), (4.0, 0, "does not hold"), (2.0, 1e-2, "does not hold")],
)
def test_verdict(chapter, square, error, word):
    exact = {f"case {i}": [1e-6 if i < 4 else 1e-3] * 4 for i in range(8)}
    exact["case 0"] = [1e-6, 1e-6, 1e-6 + error, 1e-6]
    figures = {"growth": {"three lines": 3.9, "fused": square}, "exact": exact}
    assert CHAPTER.verdict("E23", chapter | figures) == word


def test_attentions_share_of_a_step_is_what_the_shapes_give():
    llama, said = models.config("llama-3.1-8b"), DEEPER.text["share"]
    d, layers = llama.hidden_size, llama.num_hidden_layers
    keys = d * llama.num_key_value_heads // llama.num_attention_heads
    layer = 2 * d * d + 2 * d * keys + 3 * d * llama.intermediate_size
    matrices = 2 * (layers * layer + llama.vocab_size * d)  # operations a token
    assert f"{matrices / 2e9:.1f} billion weights" in said and f"{matrices / 1e9:.1f} GFLOP" in said
    for_each = layers * 2 * 2 * d / 2  # for each token of the length: half of them, two products
    assert f"{layers} x 2 x {d:,} = {for_each / 1e6:.2f} MFLOP" in said
    rows = re.findall(r"^\| ([\d,]+) \| (\d+) % \| ([\d.]+) times \|$", said, re.MULTILINE)
    assert len(rows) == 5
    for length, percent, more in rows:
        n = int(length.replace(",", ""))
        share = for_each * n / (for_each * n + matrices)
        twice = 2 * (matrices + for_each * 2 * n) / (matrices + for_each * n)
        assert (f"{share:.0%}", f"{twice:.1f}") == (f"{percent}%", more)
    whole = 2 * for_each * 2048
    assert f"{whole / (whole + matrices):.0%}" == "7%" and "7 % at 2,048 tokens" in said
    shares = {length: percent for length, percent, _ in rows}
    chapter = CHAPTER.text["bill-words-text"]
    assert f"{shares['2,048']} % at 2,048 tokens" in chapter
    assert f"{shares['32,768']} % at 32,768" in chapter
    assert f"{rows[0][2]} times as many" in Notebook("03-anatomy").text["coefficients-read"]
