"""Chapter 12: its formulas are the libraries', its formats their standards'."""

import inspect

import pytest
import torch
from notebook import Notebook
from transformers import AwqConfig, GPTQConfig

from memlab import models
from memlab.book.chapters import quantization
from memlab.book.chapters.patients import error
from memlab.book.chapters.quantization_formats import (
    E2M1,
    awq,
    formats,
    gptq,
    nearest,
    weight_bytes,
)

CHAPTER, DEEPER = Notebook("12-quantization"), Notebook("12-quantization-deeper")
SETUP = "imports affine symmetric bits by-hand-shown nf4-table blockwise-code unpacked"
TOOLS = "imports rounded schemes with-inputs calibrate affine static integers mixed-product"


@pytest.fixture(scope="module")
def chapter():
    names = CHAPTER.run(SETUP)
    return names | {"NF4": names["normal_float"]()}


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run(TOOLS)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shift", [0.0, 3.0, -0.4])
def test_asymmetric_codes_come_back_within_half_a_step_as_torch_rounds_them(chapter, bits, shift):
    torch.manual_seed(0)
    x = torch.randn(1000) + shift
    codes, scale, zero = chapter["affine"](x, bits)
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert lowest <= codes.min() and codes.max() <= highest
    assert lowest <= zero <= highest  # so that 0 is one of the codes
    back = scale * (codes - zero)
    at = scale.item(), int(zero.item()), lowest, highest
    torch.testing.assert_close(back, torch.fake_quantize_per_tensor_affine(x, *at))
    # The zero point is rounded too: at the ends half a step more.
    assert (x - back).abs().max() <= scale.item() * 1.001


@pytest.mark.parametrize("dim, axis", [(1, 0), (0, 1)])
def test_symmetric_codes_are_those_of_torch_for_rows_and_columns(chapter, dim, axis):
    torch.manual_seed(0)
    x = torch.randn(32, 48)
    codes, scale = chapter["symmetric"](x, 8, dim)
    assert codes.abs().max() == 127 and scale.numel() == x.shape[axis]
    zeros = torch.zeros(scale.numel(), dtype=torch.int32)
    at = scale.flatten(), zeros, axis, -127, 127
    torch.testing.assert_close(codes * scale, torch.fake_quantize_per_channel_affine(x, *at))
    assert (x - codes * scale).abs().max() <= scale.max() / 2 * 1.001


@pytest.mark.parametrize("value", [0.0, 0.7, -3.0])
def test_constant_tensors_come_back(chapter, value):
    x = torch.full((64,), value)
    codes, scale, zero = chapter["affine"](x)
    torch.testing.assert_close(scale * (codes - zero), x, rtol=1e-2, atol=0)
    codes, scale = chapter["symmetric"](x)
    torch.testing.assert_close(codes * scale, x)
    torch.testing.assert_close(chapter["in_format"](x, chapter["NF4"]), x)


def test_nf4_is_bitsandbytes_table_block_by_block_and_byte_by_byte(chapter):
    bnb = chapter["bnb"].functional
    theirs = bnb.get_4bit_type("nf4", device="cpu")
    torch.testing.assert_close(chapter["NF4"], theirs, rtol=0, atol=5e-7)
    CHAPTER.run("blockwise-same", chapter)
    assert chapter["same_bytes"] > 0.999
    matrix, ways = chapter["matrix"], formats(chapter["NF4"])
    ours, twice = (
        error(matrix, chapter["in_format"](matrix, *ways[name])) for name in ("NF4", "NF4, double")
    )
    _, once = quantization.agreement(chapter["codes"], matrix, torch.device("cpu"))
    stored, state = bnb.quantize_4bit(matrix, quant_type="nf4", compress_statistics=True)
    assert ours == pytest.approx(once, rel=1e-3)
    assert twice == pytest.approx(error(matrix, bnb.dequantize_4bit(stored, state)), rel=1e-3)
    assert twice == pytest.approx(ours, rel=0.01)  # 8 bits are enough for a scale


def test_block_scaled_formats_store_what_their_standards_say(chapter):
    """MXFP4: 16 codes of E2M1 under a power of two; NVFP4: under an E4M3 scale of 16 numbers."""
    bits, ways = chapter["bits"], formats(chapter["NF4"])
    assert (bits["MXFP4"], bits["NVFP4"], bits["MXFP8"]) == (4.25, 4.5, 8.25)
    table = E2M1
    assert set(table.abs().tolist()) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}
    torch.manual_seed(0)
    matrix = torch.randn(512, 256)
    codes, scale = chapter["blockwise"](matrix, *ways["MXFP4"])
    largest = matrix.reshape(-1, 32).abs().amax(1, keepdim=True)
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))
    assert (largest / scale >= 4).all() and (largest / scale < 8).all()
    codes, scale = chapter["blockwise"](matrix, *ways["NVFP4"])
    whole = matrix.abs().max() / 6 / 448
    stored = (scale / whole).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(stored * whole, scale)
    # bitsandbytes' fp4 is not E2M1: it has another smallest value.
    theirs = chapter["bnb"].functional.get_4bit_type("fp4", device="cpu").unique()
    apart = (theirs - table / 6).abs() > 1e-3
    assert apart.sum() == 2 and theirs[apart].abs().max() < 0.01


def test_bits_a_weight_are_what_the_layers_keep_and_what_a_card_gives_out(chapter):
    layers = quantization.layer_bits(torch.device("cpu"))
    assert (chapter["single"], round(chapter["double"], 3)) == (4.5, 4.127)
    count = 2048**2
    tables = {"NF4": 16 * 4, "NF4, double": (16 + 256) * 4 + 4, "int8": 0}
    for name, row in layers.iterrows():
        assert row["measured"] == row["predicted"] + tables[name] * 8 / count
        assert abs(row["simulated"] - row["measured"]) < 5 * 512 * 8 / count


def test_the_whole_model_is_counted_and_simulated_alike(chapter):
    run = quantization.one_pass("llama-3.2-1b", "nf4")
    said = weight_bytes("llama-3.2-1b", chapter["double"])
    assert run.breakdown["parameters"] == pytest.approx(said, rel=1e-3)


def test_the_mixed_product_is_that_of_the_rounded_sides(deeper):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 128), torch.randn(256, 128) / 128**0.5
    x[:, 5] *= 60
    back = deeper["mixed"](x) @ deeper["rounded"](weight).T
    torch.testing.assert_close(back, deeper["mixed_product"](x, weight), rtol=1e-2, atol=0.2)


def test_data_makes_more_of_the_same_bits():
    torch.manual_seed(0)
    weight, inputs = torch.randn(16, 32), torch.randn(200, 32) @ torch.randn(32, 32)
    for method in (awq, gptq):
        truth, back = inputs @ weight.T, method(weight, inputs, 3)
        plain = nearest(weight, inputs, 3)
        assert error(truth, inputs @ back.T) <= error(truth, inputs @ plain.T)
    # Exact at many bits, and marks of each row only.
    torch.testing.assert_close(gptq(weight, inputs, 20), weight, rtol=0, atol=1e-4)
    scale = weight.abs().amax(1, keepdim=True) / 3
    codes = gptq(weight, inputs, 3) / scale
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)


def test_static_ranges_are_those_of_the_rows_and_clip_beyond(deeper):
    model = models.build("llama-3.2-1b-tiny").eval()
    ranges = deeper["calibrate"](model, torch.arange(1, 65).reshape(2, 32))
    assert set(ranges) == set(deeper["linears"](model))
    name = "layers.0.mlp.down_proj"
    low, high = ranges[name]
    change = deeper["static"](ranges, 8)
    given = torch.tensor([low, 0.0, high, 10 * high])
    back, step = change(given, name), (high - low) / 255
    torch.testing.assert_close(back, torch.tensor([low, 0.0, high, high]), rtol=0, atol=step)
    zero = round(-low / step)
    theirs = torch.fake_quantize_per_tensor_affine(given, step, zero, 0, 255)
    torch.testing.assert_close(back, theirs, rtol=0, atol=1e-5)


def test_the_straight_through_estimator_rounds_forward_and_not_backward(deeper):
    DEEPER.run("ste aware", deeper)
    weight = torch.randn(4, 8, requires_grad=True)
    out = deeper["StraightThrough"]()(weight)
    torch.testing.assert_close(out, deeper["rounded"](weight.detach(), 2))
    out.backward(upstream := torch.randn(4, 8))
    assert torch.equal(weight.grad, upstream)


@pytest.mark.parametrize("method", [AwqConfig, GPTQConfig])
def test_the_files_of_gptq_and_awq_take_the_bits_of_the_table(chapter, method):
    """Codes, and of each group an fp16 scale and a zero point as wide as a code, in int32."""
    default = {n: p.default for n, p in inspect.signature(method).parameters.items()}
    size, outputs, inputs = default["group_size"], 4096, 4096
    codes = torch.empty(inputs * 4 // 32, outputs, dtype=torch.int32)
    zeros = torch.empty(inputs // size, outputs * 4 // 32, dtype=torch.int32)
    scales = torch.empty(inputs // size, outputs, dtype=torch.float16)
    stored = sum(8 * t.nbytes for t in (codes, zeros, scales)) / (inputs * outputs)
    assert size == 128 and stored == chapter["bits"]["int4: GPTQ, AWQ"]
