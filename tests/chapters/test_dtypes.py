"""Chapter 2: its formats are the libraries', its rounding exact, its blocks the standard's."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from exact import ML_DTYPES, roundings, value
from notebook import Notebook

CHAPTER = Notebook("02-dtypes")
FORMATS = CHAPTER.run("formats-code formats-table")["FORMATS"]


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run("imports formats-code formats-table step nearest-code block-scales")


def test_integers_and_the_formats_without_a_library():
    assert [FORMATS[n].largest for n in ("int16", "int8", "int4")] == [32767, 127, 7]
    assert (FORMATS["tf32"].bits, FORMATS["tf32"].stored) == (19, 32)
    assert [value(FORMATS["fp4 E3M0"], code) for code in range(8)] == [0, 0.25, 0.5, 1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    "name, dtype", [("fp32", np.float32)] + [(n, d) for n, (d, _) in ML_DTYPES.items()]
)
def test_the_limits_are_those_of_the_libraries(name, dtype):
    known, info = FORMATS[name], ml_dtypes.finfo(dtype)
    assert (known.bits, known.largest) == (info.bits, float(info.max))
    assert known.smallest == float(info.smallest_subnormal)
    assert 2.0**-known.mantissa == float(info.eps)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_the_definition_gives_every_code_the_value_that_the_libraries_give_it(name):
    known, codes = FORMATS[name], np.arange(2 ** FORMATS[name].bits)
    ours = [float(value(known, code)) for code in codes.tolist()]
    dtype, whole = ML_DTYPES[name]
    with np.errstate(invalid="ignore"):  # NaN
        theirs = codes.astype(whole).view(dtype).astype(float)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", FORMATS)
def test_the_shown_rounding_is_to_the_nearest(chapter, name):
    known = FORMATS[name]
    given, codes = zip(*roundings(known), strict=True)
    x = torch.tensor(given, dtype=torch.float64)
    wanted = torch.tensor([value(known, code) for code in codes], dtype=torch.float64)
    for sign in (1, -1):  # the chapter keeps integers symmetric
        assert torch.equal(chapter["nearest"](sign * x, known), sign * wanted)
    assert known.smallest == value(known, 1)


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
