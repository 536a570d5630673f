"""Operators that take functions: flex_attention by both of its ways, and what is refused."""

import warnings

import pytest
import torch
from helpers import allocated, refused
from torch._prims.rng_prims import run_and_save_rng_state
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from memlab import SimulatedGPU
from memlab.card.placement import NotSimulated
from memlab.models import build, config

LENGTH, HEADS, SIZE = 1024, 8, 64
OUT = LENGTH * HEADS * SIZE * 2  # bytes in bf16
ROWS = LENGTH * HEADS * 4  # of a number in fp32 for each row of scores
NO_MASK = 4 * 512  # of one block
SCORES = LENGTH * LENGTH * HEADS * 4


@pytest.fixture
def gpu():
    """The H100 on which a test's tensors lie."""
    with SimulatedGPU("H100") as card, torch.device("cuda"):
        yield card


def drawn(heads=HEADS, size=SIZE):
    made = torch.randn(1, LENGTH, heads, size, device="cuda", dtype=torch.bfloat16)
    return made.transpose(1, 2).requires_grad_()


def above(before):
    """The peak above `before`, from which the next one counts."""
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    return peak


@pytest.mark.parametrize(("heads", "size"), [(HEADS, SIZE), (HEADS // 4, SIZE), (HEADS, 2 * SIZE)])
def test_the_compiled_kernel_keeps_its_result_and_a_number_of_each_row(gpu, heads, size):
    """heads: of keys. size: of a value; queries and keys lie as a projection makes them."""
    query, key, value = drawn(), drawn(heads), drawn(heads, size)
    before = allocated()
    out = torch.compile(flex_attention)(query, key, value, enable_gqa=heads < HEADS)
    result, shared, values = (
        OUT * size // SIZE,
        OUT * heads // HEADS,
        OUT * heads * size // (HEADS * SIZE),
    )
    assert allocated() - before == result + ROWS + NO_MASK
    peak = result + 2 * ROWS  # the largest scores, too
    assert peak <= above(before) <= peak + 3 * NO_MASK
    grad = torch.empty_like(out)
    assert out.stride() == (LENGTH * HEADS * size, size, HEADS * size, 1)
    before = allocated()
    out.backward(grad)
    assert above(before) == ROWS + OUT + shared + values
    assert key.grad.stride() == key.stride()


def test_scores_are_written_out_where_nothing_is_compiled(gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that it does so
        query = drawn()
        before = allocated()
        out = flex_attention(query, query, query, score_mod=lambda x, b, h, i, j: x - (i - j))
        assert allocated() - before == OUT + 2 * ROWS + NO_MASK
        assert above(before) > 3 * SCORES
        out.sum().backward()
        assert above(before) > 3 * SCORES and query.grad.shape == query.shape


def test_compiled_code_has_the_compiled_kernel_also_where_it_runs_eagerly():
    def attend(query):
        return flex_attention(query, query, query)

    with SimulatedGPU("H100", compile_eagerly=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        query = drawn()
        before = allocated()
        torch.compile(attend)(query)
        assert above(before) < SCORES


def test_a_compiled_block_mask_is_never_written_out(gpu):
    n = 4096
    document = torch.arange(n + 1) // 100

    def rule(batch, head, i, j):
        return document[i] == document[j]

    before = allocated()
    whole = create_block_mask(rule, None, None, n, n, device="cuda")
    assert above(before) > n * n
    before = allocated()
    for length in (n, n - 1):
        mask = torch.compile(create_block_mask)(rule, None, None, length, length, "cuda")
    assert above(before) < n * n // 10
    for name in ("kv_num_blocks", "kv_indices", "full_kv_indices", "q_indices"):
        assert getattr(mask, name).shape == getattr(whole, name).shape
    x = torch.randn(1, 1, n - 1, 64, requires_grad=True)
    torch.compile(flex_attention)(x, x, x, block_mask=mask).sum().backward()
    assert x.grad.shape == x.shape


def test_a_learned_bias_of_scores_has_its_gradient_and_autocast_its_dtype(gpu):
    bias = torch.nn.Parameter(torch.zeros(HEADS))
    x = torch.randn(1, HEADS, LENGTH, SIZE, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        attend = torch.compile(flex_attention)
        out = attend(x, x, x, score_mod=lambda score, b, head, i, j: score + bias[head])
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert bias.grad.shape == bias.shape and x.grad.dtype == torch.float32
    with refused("learned bias", kind=NotSimulated):
        flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score + bias[h])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_the_kernel_again(gpu, reentrant):
    x = drawn()
    before = allocated()
    attend = torch.compile(flex_attention)
    out = checkpoint(lambda x: attend(x, x, x), x, use_reentrant=reentrant)
    assert OUT <= allocated() - before <= OUT + NO_MASK
    out.sum().backward()
    products = gpu.footprint.step_seconds.flops
    assert products == LENGTH * LENGTH * HEADS * SIZE * 2 * (2 + 5)  # what comes again is no use


def test_transformers_trains_with_it(gpu):
    model = build(config("llama-3-8b-tiny"), "causal-lm", torch.bfloat16, "flex_attention")
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(100, (2, 128))
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert any("flex_attention" in one for one in gpu.footprint.assumptions)


# ---------------------------------------------------------------------- other operators


def test_what_only_compiled_code_has_is_refused_by_its_name(gpu):
    with refused("run_and_save_rng_state is not simulated", kind=NotSimulated):
        run_and_save_rng_state(torch.ops.aten.rand.default, [4], device="cuda")
