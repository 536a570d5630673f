"""Chapter 12: its formulas are the libraries', its formats their standards'."""

import bitsandbytes as bnb
import pytest
import torch
from notebook import Notebook, cells_of

from memlab import models

CHAPTER, DEEPER = Notebook("12-quantization"), Notebook("12-quantization-deeper")
SETUP = "imports affine symmetric bits granularity-rounded nf4-table blockwise-code unpacked scales"
TOOLS = "imports rounded changes schemes calibrate affine methods ste aware"


chapter = cells_of("12-quantization", SETUP)


deeper = cells_of("12-quantization-deeper", TOOLS)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shift", [0.0, 3.0, -0.4])
def test_asymmetric_codes_come_back_as_torch_rounds_them(chapter, bits, shift):
    torch.manual_seed(0)
    x = torch.randn(1000) + shift
    codes, scale, zero = chapter["affine"](x, bits)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert lowest <= zero <= highest  # so that 0 is one of the codes
    back = scale * (codes - zero)
    at = scale.item(), int(zero.item()), lowest, highest
    torch.testing.assert_close(back, torch.fake_quantize_per_tensor_affine(x, *at))


@pytest.mark.parametrize("dim, axis", [(1, 0), (0, 1)])
def test_symmetric_codes_are_those_of_torch_for_rows_and_columns(chapter, dim, axis):
    torch.manual_seed(0)
    x = torch.randn(32, 48)
    codes, scale = chapter["symmetric"](x, 8, dim)
    assert codes.abs().max() == 127 and scale.numel() == x.shape[axis]
    zeros = torch.zeros(scale.numel(), dtype=torch.int32)
    at = scale.flatten(), zeros, axis, -127, 127
    torch.testing.assert_close(codes * scale, torch.fake_quantize_per_channel_affine(x, *at))


@pytest.mark.parametrize("value", [0.0, 0.7, -3.0])
def test_constant_tensors_come_back(chapter, value):
    x = torch.full((64,), value)
    codes, scale, zero = chapter["affine"](x)
    torch.testing.assert_close(scale * (codes - zero), x, rtol=1e-2, atol=0)
    codes, scale = chapter["symmetric"](x)
    torch.testing.assert_close(codes * scale, x)
    torch.testing.assert_close(chapter["in_format"](x, chapter["NF4"]), x)


def test_nf4_is_bitsandbytes_table_block_by_block_and_byte_by_byte(chapter):
    theirs = bnb.functional.get_4bit_type("nf4", device="cpu")
    torch.testing.assert_close(chapter["NF4"], theirs, rtol=0, atol=5e-7)
    names = CHAPTER.run("blockwise-same", chapter | {"device": torch.device("cpu")})
    assert names["same_bytes"] > 0.999


@pytest.mark.parametrize("double", [False, True])
def test_nf4_comes_back_as_from_bitsandbytes(chapter, double):
    torch.manual_seed(0)
    matrix = torch.randn(512, 256)
    how = [chapter["in_8_bits"]] if double else []
    ours = chapter["in_format"](matrix, chapter["NF4"], 64, *how)
    stored, state = bnb.functional.quantize_4bit(
        matrix, blocksize=64, quant_type="nf4", compress_statistics=double
    )
    back = bnb.functional.dequantize_4bit(stored, state)
    # Theirs takes the mean of the scales off before it rounds them.
    ours, theirs = ((matrix - x).norm().item() for x in (ours, back))
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_block_scaled_formats_store_what_their_standards_say(chapter):
    """MXFP4: 32 codes of E2M1 under a power of two; NVFP4: 16 under an E4M3 scale."""
    assert [chapter["bits"][name] for name in ("MXFP4", "NVFP4", "MXFP8")] == [4.25, 4.5, 8.25]
    torch.manual_seed(0)
    matrix, table = torch.randn(512, 256), chapter["E2M1"]
    assert set(table.abs().tolist()) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}
    _, scale = chapter["blockwise"](matrix, table, 32, chapter["power_of_two"])
    largest = matrix.reshape(-1, 32).abs().amax(1, keepdim=True) / scale
    assert (torch.frexp(scale)[0] == 0.5).all() and ((4 <= largest) & (largest < 8)).all()
    _, scale = chapter["blockwise"](matrix, table, 16, chapter["e4m3"])
    whole = matrix.abs().max() / 6 / 448
    torch.testing.assert_close((scale / whole).to(torch.float8_e4m3fn).float() * whole, scale)


def test_the_mixed_decomposition_is_that_of_bitsandbytes(deeper):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 128), torch.randn(256, 128) / 128**0.5
    x[:, 5] *= 60
    layer = bnb.nn.Linear8bitLt(128, 256, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    theirs = layer.to("cpu")(x.half()).float()
    error, back = deeper["error"], deeper["rounded"](weight).T
    assert error(theirs, deeper["mixed"](x) @ back) < 0.01
    assert error(theirs, deeper["rounded"](x) @ back) > 0.02  # without the decomposition


def test_data_makes_more_of_the_same_bits_and_gptq_keeps_the_marks_of_each_row(deeper):
    torch.manual_seed(0)
    weight, inputs = torch.randn(16, 32), torch.randn(200, 32) @ torch.randn(32, 32)
    error = {}
    for name in ("nearest", "awq", "gptq"):
        back = deeper[name](weight, inputs, 3)
        error[name] = deeper["error"](inputs @ weight.T, inputs @ back.T)
    assert max(error["awq"], error["gptq"]) < error["nearest"]
    codes = back / (weight.abs().amax(1, keepdim=True) / 3)
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
    torch.testing.assert_close(deeper["gptq"](weight, inputs, 20), weight, rtol=0, atol=1e-4)


def test_static_ranges_are_those_of_the_rows_and_clip_beyond(deeper):
    model = models.build("llama-3.2-1b-tiny").eval()
    ranges = deeper["calibrate"](model, torch.arange(1, 65).reshape(2, 32))
    assert set(ranges) == set(deeper["linears"](model))
    name = "layers.0.mlp.down_proj"
    low, high = (end.item() for end in ranges[name])
    given, step = torch.tensor([low, 0.0, high, 10 * high]), (high - low) / 255
    theirs = torch.fake_quantize_per_tensor_affine(given, step, round(-low / step), 0, 255)
    back = deeper["static"](ranges, 8)(given, name)
    torch.testing.assert_close(back, theirs, rtol=0, atol=1e-5)


def test_the_straight_through_estimator_rounds_forward_and_not_backward(deeper):
    weight = torch.randn(4, 8, requires_grad=True)
    out = deeper["StraightThrough"]()(weight)
    torch.testing.assert_close(out, deeper["rounded"](weight.detach(), 2))
    out.backward(upstream := torch.randn(4, 8))
    assert torch.equal(weight.grad, upstream)
