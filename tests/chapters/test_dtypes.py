"""Chapter 2: what its cells show is true, fails where they say so, and is fixed where they do."""

import math
import statistics

import ml_dtypes
import pytest
import torch
from exact import exact_code, finite, interesting, value
from notebook import Notebook

from memlab.book.chapters.bits import FORMATS

CHAPTER = Notebook("02-dtypes")
SMALL = [name for name, known in FORMATS.items() if known.bits <= 16]


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run("imports step nearest-code")


@pytest.mark.parametrize("name", SMALL)
def test_the_shown_rounding_is_exact_arithmetics(chapter, name):
    known, numbers = FORMATS[name], finite(FORMATS[name])
    doubles = [x for x in interesting(known, seed=3) if math.isfinite(x)]
    stored = chapter["nearest"](torch.tensor(doubles, dtype=torch.float64), known).tolist()
    for x, found in zip(doubles, stored, strict=True):
        wanted = float(value(known, exact_code(known, x, numbers)))
        if not known.exponent and x < 0:  # the chapter keeps integers symmetric
            wanted = max(wanted, -known.largest)
        assert found == wanted, (x.hex(), found, wanted)


def test_the_shown_rounding_to_tf32_adds_half_a_unit_and_cuts(chapter):
    x = torch.randn(10_000) * torch.exp2(60 * torch.rand(10_000) - 30)
    x[:1000] = ((x[:1000].view(torch.int32) & ~0x1FFF) | 0x1000).view(torch.float32)  # ties
    cut = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    assert torch.equal(chapter["nearest"](x, FORMATS["tf32"]), cut.double())
    assert torch.equal(chapter["nearest"](x, FORMATS["fp32"]), x.double())


def test_the_first_model_fits_a_t4_in_16_bits_only(chapter):
    CHAPTER.run("load load-run sizes", chapter)
    assert "out of memory" in chapter["loaded"][torch.float32]
    count = chapter["counts"]["qwen2.5-7b"]
    assert chapter["loaded"][torch.float16] == pytest.approx(2 * count, rel=0.01)


@pytest.mark.parametrize(
    "name, element",
    [("fp8 E4M3", ml_dtypes.float8_e4m3fn), ("fp4 E2M1", ml_dtypes.float4_e2m1fn)],
)
def test_blocks_are_what_the_standard_says(chapter, name, element):
    """MXFP8 and MXFP4: 32 elements under a power of two (MX specification, section 6.3)."""
    CHAPTER.run("block-scales blocks-run", chapter)
    known, x = FORMATS[name], chapter["small"]
    blocks = x.reshape(-1, 32)
    power = blocks.abs().amax(1, keepdim=True).log2().floor()
    scale = torch.exp2(power - math.floor(math.log2(known.largest)))
    assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)
    held = (blocks / scale).clamp(-known.largest, known.largest).numpy()
    back = torch.from_numpy(held.astype(element).astype("float32")) * scale
    ours = chapter["in_blocks"](x, known)
    assert torch.equal(ours.float(), back.reshape(x.shape))
    assert chapter["off"] == pytest.approx({"bare": 1, "in blocks": 0.1}, abs=0.05)


@pytest.mark.slow
def test_range_decides_what_storing_a_trained_model_costs(chapter):
    CHAPTER.run("store store-run", chapter)
    harm, base = chapter["harm"], chapter["patients"].base
    assert len(base) == 3 and max(base) < 5.2  # they learned: 6.24 is a guess among 512 tokens
    mean = {key: statistics.fmean(more) for key, more in harm.items()}
    for name in ("bf16", "fp16", "fp8 E4M3"):
        assert abs(mean[name, "bare"]) < 0.005
    for name in ("int8", "int4", "fp4 E2M1", "fp4 E3M0"):
        assert min(harm[name, "bare"]) > 0.5
        assert max(harm[name, "scaled"]) < 0.05
    assert abs(mean["int8", "scaled"]) < mean["int4", "scaled"]


def test_sums_swallow_and_stop_and_a_master_copy_keeps_updates(chapter):
    reached = CHAPTER.run("absorb-run", chapter)["reached"]
    weights, counters = zip(*reached.values(), strict=True)
    assert list(reached) == [torch.float32, torch.float16, torch.bfloat16]
    assert weights[0] == pytest.approx(2, abs=1e-3) and weights[1] != 2 and weights[2] == 1
    assert torch.tensor(weights[0]).bfloat16() == 2
    assert counters == (10_000, 2.0**11, 2.0**8)


def test_attention_overflows_and_is_fixed_by_order_or_by_range(chapter):
    tried = CHAPTER.run("overflow", chapter)["tried"]
    assert tried.pop((torch.float16, "last")) is False
    assert list(tried.values()) == [True] * 3


def test_bf16_to_fp32_is_exact_and_to_fp16_is_not(chapter):
    CHAPTER.run("tf32-code half-run e2-timed", chapter)
    assert chapter["exact"] and chapter["rounds_off"]
    assert chapter["too_large"] > 0.3 and chapter["gone"] > 0.3


def test_rounding_the_inputs_makes_the_error_that_their_mantissas_say(chapter):
    off = CHAPTER.run("tf32-code", chapter)["off"]
    # Two inputs; 1/m^2 averaged over mantissas m from 1 to 2; step^2 / 12.
    share = math.sqrt(2 * 0.75 / (2 * math.log(2)) / 12)
    for name in ("tf32", "fp16", "bf16"):
        assert off[name] == pytest.approx(share * FORMATS[name].epsilon, rel=0.05)
    assert off["fp32"] < off["tf32"] / 100


@pytest.mark.parametrize("number, wrong", [(1, 240), (2, 8), (3, 1.0)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    CHAPTER.run({2: "packed", 3: "buggy"}.get(number, ""), chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)
