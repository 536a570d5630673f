"""Chapter 14: its tiles are exact, its counts are those of PyTorch's kernels."""

import pytest
import torch
import torch.nn.functional as F
from notebook import Notebook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab import Recipe, SimulatedGPU
from memlab.workloads.training import Training

CODE = "standard two-numbers extremes traffic hbm flash-forward flash-backward flash-function"


@pytest.fixture(scope="module")
def page():
    chapter = Notebook("14-attention")
    return chapter.run(f"imports settings {CODE} ways predict-run kernel-of register mask-trap")


@pytest.fixture(scope="module")
def deeper():
    return Notebook("14-attention-deeper").run("imports heads heads-mended")


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
def test_tiles_give_attention_and_its_gradients(page, dtype, causal, length, tile):
    torch.manual_seed(length)
    *tensors, dout = (torch.randn(2, 3, length, 8).to(dtype) for _ in range(4))
    flash = lambda q, k, v: page["Flash"].apply(q, k, v, causal, tile)  # noqa: E731
    library = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    truth = results(library, tensors, dout, torch.float64)
    found = results(flash, tensors, dout, dtype)
    assert all(x.dtype == dtype for x in found)
    if dtype == torch.float32:
        assert farthest(found, truth) < 1e-5
    else:  # no farther from the truth than three lines in the same format, but for one rounding
        lines = lambda q, k, v: page["standard"](q, k, v, causal)  # noqa: E731
        allowed = farthest(results(lines, tensors, dout, dtype), truth)
        assert farthest(found, truth) <= allowed + 2**-8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(19, 33), (33, 19)])
def test_tiles_take_other_keys_than_queries_and_other_values_than_keys(page, queries, keys, causal):
    torch.manual_seed(0)
    tensors = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 5)
    dout = torch.randn(2, 3, queries, 5)
    flash = lambda q, k, v: page["Flash"].apply(q, k, v, causal, 8)  # noqa: E731
    library = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    truth = results(library, tensors, dout, torch.float64)
    assert farthest(results(flash, tensors, dout, torch.float32), truth) < 1e-5


def test_tiles_survive_extreme_scores(page):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 50, 8) for _ in range(3))
    for factor in (1e-20, 1e2, 1e4):
        out, lse = page["flash_forward"](q * factor, k * factor, v, True, 8)
        scores = (q * factor).double() @ (k * factor).double().mT * 8**-0.5
        hidden = torch.ones(50, 50, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        torch.testing.assert_close(lse[..., 0].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
        gradients = page["flash_backward"](q * factor, k * factor, v, out, lse, v, True, 8)
        assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 4096])
def test_the_running_softmax_is_the_softmax(page, size):
    for row in page["HARD"].values():
        m, total = page["two_numbers"](row, size)
        found = (m + total.log()).double()
        torch.testing.assert_close(found, row.double().logsumexp(0), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_running_softmax_takes_the_largest_finite_numbers(page, size):
    for row in ([-3e38, 0.0, 3e38], [3e38, -3e38, 3e38], [-3e38, -3e38, -torch.inf]):
        m, total = page["two_numbers"](torch.tensor(row), size)
        assert m == torch.tensor(max(row)) and total == row.count(max(row))


class Crossing(TorchDispatchMode):
    """Bytes that kernels read and write."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket.__name__ == "_unsafe_view"):
            self.nbytes += sum(x.nbytes for x in tree_leaves((args, out)) if torch.is_tensor(x))
        return out


def test_what_crosses_is_counted_as_pytorchs_kernels_do_it(page):
    q, k, v = (torch.empty(1, 1, 256, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    with Crossing() as crossing:
        page["standard"](q, k, v)
    assert page["moved"](256) == crossing.nbytes


@pytest.mark.parametrize("way, kernel", [("memory-efficient", "Efficient"), ("math", "math")])
def test_the_kernel_is_read_off_the_graph(page, way, kernel):
    with SimulatedGPU("A100-40GB"):
        out = page["WAYS"][way](*page["inputs"](64, "cuda", torch.float16))
        assert page["kernel_of"](out) == kernel
        padded = F.scaled_dot_product_attention(*page["inputs"](64, "cuda", torch.float16, d=50))
        assert page["kernel_of"](padded) == "Flash"  # which cuts its output back to 50


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


def test_padding_on_the_right_needs_no_mask(page):
    q, k, v = (torch.randn(1, 2, 64, 64) for _ in range(3))
    real = torch.arange(64) < 50
    both = real & torch.ones(64, 64).tril().bool()
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=both)
    flagged = page["causal_by_flag"](q, k, v)
    torch.testing.assert_close(masked[:, :, real], flagged[:, :, real])


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
