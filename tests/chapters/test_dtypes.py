"""Chapter 2: its rounding is exact, its blocks are what the standard says."""

import math

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
    return CHAPTER.run("imports step nearest-code block-scales")


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


@pytest.mark.parametrize(
    "name, element",
    [("fp8 E4M3", ml_dtypes.float8_e4m3fn), ("fp4 E2M1", ml_dtypes.float4_e2m1fn)],
)
def test_blocks_are_what_the_standard_says(chapter, name, element):
    """MXFP8 and MXFP4: 32 elements under a power of two (MX specification, section 6.3)."""
    torch.manual_seed(0)
    known, x = FORMATS[name], 0.02 * torch.randn(1024, 64)
    blocks = x.reshape(-1, 32)
    power = blocks.abs().amax(1, keepdim=True).log2().floor()
    scale = torch.exp2(power - math.floor(math.log2(known.largest)))
    assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)
    held = (blocks / scale).clamp(-known.largest, known.largest).numpy()
    back = torch.from_numpy(held.astype(element).astype("float32")) * scale
    ours = chapter["in_blocks"](x, known)
    assert torch.equal(ours.float(), back.reshape(x.shape))
