"""Chapter 2: its formats are the libraries', its rounding exact, its blocks the standard's."""

import math

import numpy as np
import pytest
import torch
from exact import ML_DTYPES, roundings, value
from notebook import Notebook, cells_of

CHAPTER = Notebook("02-dtypes")
FORMATS = CHAPTER.run("formats-code formats-table")["FORMATS"]


chapter = cells_of("02-dtypes", "imports formats-code formats-table step nearest-code block-scales")


@pytest.mark.parametrize("name", ML_DTYPES)
def test_the_definition_gives_every_code_the_value_that_the_libraries_give_it(name):
    known, codes = FORMATS[name], np.arange(2 ** FORMATS[name].bits)
    ours = [float(value(known, code)) for code in codes.tolist()]
    dtype, whole = ML_DTYPES[name]
    with np.errstate(invalid="ignore"):  # NaN
        theirs = codes.astype(whole).view(dtype).astype(float)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8 E5M2", torch.float8_e5m2),
        ("fp8 E4M3", torch.float8_e4m3fn),
    ],
)
def test_the_definition_rounds_as_torch_does(name, dtype):
    """Up to what becomes of a number beyond the largest."""
    known = FORMATS[name]
    of_fp32 = [pair for pair in roundings(known) if float(np.float32(pair[0])) == pair[0]]
    given, codes = zip(*of_fp32, strict=True)
    stored = torch.tensor(given).to(dtype).double()
    assert stored.tolist() == [value(known, code) for code in codes] and len(codes) > 200


def test_the_formats_without_a_library():
    assert [FORMATS[n].largest for n in ("int16", "int8", "int4")] == [32767, 127, 7]
    assert [value(FORMATS["fp4 E3M0"], code) for code in range(8)] == [0, 0.25, 0.5, 1, 2, 4, 8, 16]


@pytest.mark.parametrize("name", FORMATS)
def test_the_shown_rounding_is_to_the_nearest(chapter, name):
    known = FORMATS[name]
    given, codes = zip(*roundings(known), strict=True)
    x = torch.tensor(given, dtype=torch.float64)
    wanted = torch.tensor([value(known, code) for code in codes], dtype=torch.float64)
    for sign in (1, -1):  # the chapter keeps integers symmetric
        assert torch.equal(chapter["nearest"](sign * x, known), sign * wanted)
    assert (known.smallest, known.largest) == (value(known, 1), given[-4])


@pytest.mark.parametrize("name", ["fp8 E4M3", "fp4 E2M1"])
def test_blocks_are_what_the_standard_says(chapter, name):
    """MXFP8 and MXFP4: 32 elements under a power of two (MX specification, section 6.3)."""
    torch.manual_seed(0)
    known, x = FORMATS[name], 0.02 * torch.randn(1024, 64)
    blocks = x.reshape(-1, 32)
    power = blocks.abs().amax(1, keepdim=True).log2().floor()
    scale = torch.exp2(power - math.floor(math.log2(known.largest)))
    held = (blocks / scale).clamp(-known.largest, known.largest).numpy()
    back = held.astype(ML_DTYPES[name][0]).astype(np.float32) * scale.numpy()
    np.testing.assert_array_equal(chapter["in_blocks"](x, known), back.reshape(x.shape))
