"""Chapter 12: its formulas are the libraries', its comparisons hold, its refusals are clear."""

import inspect
import math
import statistics

import pytest
import torch
from notebook import Notebook
from transformers import AwqConfig, GPTQConfig

CHAPTER, DEEPER = Notebook("12-quantization"), Notebook("12-quantization-deeper")
SETUP = """imports checked affine symmetric error bits bits-stored by-hand by-hand-run by-hand-table
    changed harm granularity-code in-8-bits granularity-rounded nf4-table nf4-tables
    blockwise-code unpacked"""
TOOLS = """imports rounded error linears with-rounded harm grown schemes schemes-all with-inputs
    harm-of calibrate affine static dynamic integers mixed-product"""


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(SETUP)


@pytest.fixture(scope="module")
def patients(chapter):
    """The chapter's trained models, one for each of three seeds."""
    CHAPTER.run("corpus patient-model teach-run", chapter)
    assert len(chapter["patients"]) == 3 and max(chapter["base"]) < 5  # 6.24 is a guess
    return chapter


@pytest.fixture(scope="module")
def deeper():
    """The deeper page's tools and its trained models, one for each of three seeds."""
    page = DEEPER.run(TOOLS + " patients teach teach-run loss-on ways harm-by")
    page = DEEPER.run("ranges", page)
    assert len(page["patients"]) == 3 and max(page["base"]) < 5
    return page


@pytest.mark.slow
def test_both_pages_ask_the_same_models(patients, deeper):
    assert patients["base"] == pytest.approx(deeper["base"], abs=0.05)


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
    codes, largest = chapter["blockwise"](x, chapter["NF4"])
    back = chapter["unpacked"](codes, largest, chapter["NF4"], x.shape)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["affine", "symmetric", "blockwise"])
def test_numbers_without_a_scale_are_refused_in_one_line(chapter, name, bad):
    x = torch.ones(2, 64)
    x[1, 3] = bad
    more = [chapter["NF4"]] if name == "blockwise" else []
    with pytest.raises(ValueError, match="1 of 128 numbers are NaN or infinite: ") as refused:
        chapter[name](x, *more)
    assert "\n" not in str(refused.value)


def test_no_numbers_are_refused(chapter):
    with pytest.raises(ValueError, match="0 of 0 numbers"):
        chapter["symmetric"](torch.empty(0))


@pytest.mark.parametrize("size", [0, -64, 63, 129])
def test_block_sizes_that_do_not_fit_are_refused(chapter, size):
    with pytest.raises(ValueError, match=f"size is {size} for 128 numbers: allowed are"):
        chapter["blockwise"](torch.ones(2, 64), chapter["NF4"], size)


def test_asymmetric_wins_where_the_data_is_skewed(chapter):
    skewed = CHAPTER.run("skewed-run skewed-kinds skewed-table", chapter)["skewed"]
    for bits in (8, 4):
        ratio = skewed[f"{bits}: asymmetric"] / skewed[f"{bits}: symmetric"]
        assert ratio.drop("normal").max() < 0.7 < 0.9 < ratio["normal"] < 1


def test_nf4_is_bitsandbytes_table_block_by_block_and_byte_by_byte(chapter):
    bnb = chapter["bnb"].functional
    theirs = bnb.get_4bit_type("nf4", device="cpu")
    torch.testing.assert_close(chapter["NF4"], theirs, rtol=0, atol=5e-7)
    CHAPTER.run(
        "nf4-figure blockwise-same blockwise-assert which4-run which4-four which4-table", chapter
    )
    assert chapter["same_bytes"] > 0.999
    matrix, change = chapter["matrix"], chapter["in_format"]
    twice = change(chapter["FOUR"]["NF4, double"])(matrix)
    stored, state = bnb.quantize_4bit(matrix, quant_type="nf4", compress_statistics=True)
    backs = chapter["back"], chapter["their_back"], twice, bnb.dequantize_4bit(stored, state)
    errors = [chapter["error"](matrix, back) for back in backs]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    assert errors[2] == pytest.approx(errors[3], rel=1e-3)
    assert errors[2] == pytest.approx(errors[0], rel=0.01)  # 8 bits are enough for a scale


def test_block_scaled_formats_store_what_their_standards_say(chapter):
    """MXFP4: 16 codes of E2M1 under a power of two; NVFP4: under an E4M3 scale of 16 numbers."""
    CHAPTER.run("nf4-figure blockwise-same which4-run which4-four", chapter)
    bits = chapter["bits"]
    assert (bits["MXFP4"], bits["NVFP4"], bits["MXFP8"]) == (4.25, 4.5, 8.25)
    table = chapter["TABLES"]["E2M1"]
    assert set(table.abs().tolist()) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}
    matrix = chapter["matrix"]
    codes, scale = chapter["blockwise"](matrix, *chapter["FOUR"]["MXFP4"])
    largest = matrix.reshape(-1, 32).abs().amax(1, keepdim=True)
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))
    assert (largest / scale >= 4).all() and (largest / scale < 8).all()
    codes, scale = chapter["blockwise"](matrix, *chapter["FOUR"]["NVFP4"])
    whole = matrix.abs().max() / 6 / 448
    stored = (scale / whole).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(stored * whole, scale)
    # bitsandbytes' fp4 is not E2M1: it has another smallest value.
    theirs = chapter["bnb"].functional.get_4bit_type("fp4", device="cpu").unique()
    apart = (theirs - table / 6).abs() > 1e-3
    assert apart.sum() == 2 and theirs[apart].abs().max() < 0.01


def test_bits_a_weight_are_what_the_layers_keep_and_what_a_card_gives_out(chapter):
    CHAPTER.run("measure-forms measure-names measure-run", chapter)
    assert (chapter["single"], round(chapter["double"], 3)) == (4.5, 4.127)
    count = 2048**2
    tables = {"nf4": 16 * 4, "nf4, double": (16 + 256) * 4 + 4, "int8": 0}
    derived = {"nf4": chapter["single"], "nf4, double": chapter["double"]}
    derived["int8"] = 8 + 32 / 2048
    for name, kept in chapter["kept"].items():
        assert kept == count * derived[name] / 8 + tables[name]
        assert abs(chapter["given"][name] - kept) < 5 * 512


def test_the_whole_model_is_counted_and_simulated_alike(chapter):
    CHAPTER.run("on-card", chapter)
    held = chapter["on_card"]("llama-3.2-1b", "nf4").breakdown["parameters"]
    said = chapter["weight_bytes"]("llama-3.2-1b", chapter["double"])
    assert held == pytest.approx(said, rel=1e-3)


def test_an_outlier_spoils_its_group_only(chapter):
    planted = CHAPTER.run("planted-facts", chapter)["planted"]
    crowd, others = chapter["crowd"], chapter["others"]
    alone = chapter["error"](crowd[others], chapter["alone"])
    assert planted["tensor"] > 10 * alone
    assert planted["tensor"] > 3 * max(planted["row"], planted[16])


def test_the_mixed_product_takes_the_outliers_out(deeper):
    DEEPER.run("mixed-run", deeper)
    assert deeper["off"][0] < 0.005 < 0.02 < deeper["off"][1]
    x, weight = deeper["x"], deeper["weight"]
    back = deeper["mixed"](x) @ deeper["rounded"](weight).T
    torch.testing.assert_close(back, deeper["mixed_product"](x, weight), rtol=1e-2, atol=0.2)


def test_eight_bits_on_both_sides_have_sums_in_32(chapter):
    CHAPTER.run("int8-run", chapter)
    assert chapter["sums"].dtype == torch.int32 and chapter["outside"] > 0.9
    assert chapter["off8"] < 0.02
    with pytest.raises(AssertionError):  # kept in int8 they would be others
        torch.testing.assert_close(chapter["sums"].to(torch.int8).int(), chapter["sums"])


def test_grown_features_change_nothing_but_what_rounding_does(deeper):
    plain = deeper["patients"][0]
    grown = deeper["with_outliers"](plain, 256)
    assert deeper["loss_on"](grown) == pytest.approx(deeper["loss_on"](plain), abs=1e-4)
    cost = {name: deeper["harm_of"](scheme, 256) for name, scheme in deeper["SCHEMES"].items()}
    assert min(cost["one a tensor"]) > 0.1
    assert max(map(abs, cost["mixed (LLM.int8)"])) < 0.005
    for name in ("one a token", "blocks of 32", "clipped at 98 %"):
        assert min(cost[name]) > max(cost["mixed (LLM.int8)"])
    # The figure's alternative text: from the largest to the smallest at the right end.
    names = "one a tensor", "one a token", "blocks of 32", "mixed (LLM.int8)"
    means = [statistics.fmean(cost[name]) for name in names]
    assert means == sorted(means, reverse=True)
    deeper["mean"] = {name: [statistics.fmean(values)] for name, values in cost.items()}
    DEEPER.run("planted published published-table published-words-facts", deeper)
    assert DEEPER.verdict("E14", deeper) == "holds with a condition"


def test_finer_groups_store_more_constants_and_lose_less(patients):
    names = "granularity-run granularity-8 granularity-table granularity-loss"
    points = CHAPTER.run(names, patients)["points"]
    for bits in (3, 4, 5):
        for constant, groups in ((32, ("tensor", 256, 128, 64, 32, 16)), (8, (256, 64, 32, 16))):
            spent, errors = zip(*(points[bits, g, constant] for g in groups), strict=True)
            assert list(spent) == sorted(spent) and list(errors) == sorted(errors, reverse=True)
        assert points[bits, "row", 32][1] < points[bits, "tensor", 32][1]
        for size in (256, 64, 16):  # constants in 8 bits cost next to no precision
            close, exact = points[bits, size, 8], points[bits, size, 32]
            assert close[1] < 1.01 * exact[1] and close[0] < exact[0]
    for more, bits in ((4, 3), (5, 4)):  # a bit in the codes or in fp32 constants
        pairs = zip(points[more, 64, 32], points[bits, 16, 32], strict=True)
        assert all(a < b for a, b in pairs)
    two = [statistics.fmean(patients["harm_rounded"](2, g)) for g in ("tensor", "row", 64, 16)]
    assert two == sorted(two, reverse=True) and two[0] > 5 * two[1]


def test_data_makes_more_of_the_same_bits(patients):
    CHAPTER.run("awq gptq data-run with-data methods data-inputs data-compared", patients)
    mean = {n: statistics.fmean(found[2]) for n, found in patients["helped"].items()}
    assert mean["GPTQ"] < mean["nearest mark"] / 2
    outputs = patients["outputs"]  # of a layer with a few large input features
    assert outputs["AWQ"] < 0.7 * outputs["nearest mark"]
    torch.manual_seed(0)
    weight, inputs = torch.randn(16, 32), torch.randn(200, 32) @ torch.randn(32, 32)
    for method in (patients["awq"], patients["gptq"]):
        truth, back = inputs @ weight.T, method(weight, inputs, 3)
        plain = patients["nearest"](weight, inputs, 3)
        error = patients["error"]
        assert error(truth, inputs @ back.T) <= error(truth, inputs @ plain.T)
    # Exact at many bits, and marks of each row only.
    torch.testing.assert_close(patients["gptq"](weight, inputs, 20), weight, rtol=0, atol=1e-4)
    scale = weight.abs().amax(1, keepdim=True) / 3
    codes = patients["gptq"](weight, inputs, 3) / scale
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)


def test_published_figures_get_worse_with_fewer_bits_and_gain_more_from_data(chapter):
    CHAPTER.run("quality quality-table quality-words-facts", chapter)
    assert chapter["quality"]["bits"].is_monotonic_decreasing


def test_static_ranges_are_those_of_the_rows_and_clip_beyond(deeper):
    model, seen = deeper["patients"][0], deeper["seen"]
    ranges = deeper["calibrate"](model, seen[:32])
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


def test_activations_need_a_range_and_weights_do_not(deeper):
    DEEPER.run("activations-run inputs-of best-end with-ends clip-run", deeper)
    cost = {name: deeper["found"][name, 8] for name, _ in deeper["ways"](8)}
    for name in ("static", "static, clipped", "dynamic, a tensor", "dynamic, a token"):
        assert max(map(abs, cost[name])) < 0.01
    assert min(cost["static, guessed"]) > 0.02
    cost = {name: deeper["bound"][name, 4] for name, _ in deeper["ways"](4)}
    assert cost["dynamic, a token"] < cost["static, clipped"] < cost["static"] / 2
    weights = deeper["harm"](lambda m: deeper["with_rounded"](m, 8))
    assert max(map(abs, weights)) < 0.001
    mean = [statistics.fmean(deeper[n]) for n in ("with_data", "without_data")]
    assert mean[0] < 0.8 * mean[1]
    DEEPER.run("activations-table activations-words-facts", deeper)
    assert DEEPER.verdict("E10", deeper) == "holds with a condition"


def test_the_straight_through_estimator_rounds_forward_and_not_backward(deeper):
    DEEPER.run("ste aware", deeper)
    weight = torch.randn(4, 8, requires_grad=True)
    out = deeper["StraightThrough"]()(weight)
    torch.testing.assert_close(out, deeper["rounded"](weight.detach(), 2))
    out.backward(upstream := torch.randn(4, 8))
    assert torch.equal(weight.grad, upstream)


def test_training_for_it_beats_rounding_afterwards_for_each_of_three_seeds(deeper):
    DEEPER.run("ste aware qat-one qat-run", deeper)
    for after, control, aware, full in deeper["ends"]:
        assert full < aware < control < after
    gains = [control - aware for _, control, aware, _ in deeper["ends"]]
    assert statistics.fmean(gains) > 2 * statistics.stdev(gains)
    DEEPER.run("qat-gains qat-step qat-cost", deeper)
    assert DEEPER.verdict("E11", deeper) == "holds with a condition"
    learned = deeper["learned"]
    deeper["learned"] = learned | {"30 aware steps": learned["30 steps, then rounded"]}
    DEEPER.run("qat-gains", deeper)
    assert DEEPER.verdict("E11", deeper) == "does not hold"


def test_stored_in_bytes_computed_in_bf16_and_never_quantized_again(chapter):
    CHAPTER.run("counting stored-model stored-run stored-table", chapter)
    assert chapter["same"] and chapter["requantized"] == 0
    seen = chapter["counting"].seen
    (products,) = [key for key in seen if key[0] == "gemm_4bit"]
    assert seen[products] == 14  # seven linear layers in each of two
    assert products[2] == "torch.uint8" and products[-1] == "torch.bfloat16"
    # The count is no zero by blindness: an operation that quantizes is seen.
    with chapter["Counting"]() as counting:
        chapter["bnb"].functional.quantize_4bit(torch.randn(64), quant_type="nf4")
    assert any(key[0].startswith("quantize") for key in counting.seen)


def test_the_library_multiplies_what_it_has_unpacked(chapter):
    CHAPTER.run("inside-run", chapter)
    assert chapter["bytes4"].dtype == torch.uint8
    assert chapter["written_out"].dtype == torch.bfloat16 and chapter["off"] < 1e-2


def test_loading_in_4_bits_and_what_trainer_and_accelerate_do_with_it(chapter):
    CHAPTER.run("stored-model load-saved load-run trainer-run accelerate-run", chapter)
    assert chapter["loaded"].lm_head.weight.dtype == torch.float32
    assert "purely quantized" in chapter["refused"]
    assert chapter["count"] == 14 and chapter["same_logits"]


def test_a_pass_has_room_for_one_unpacked_layer_at_a_time(chapter):
    CHAPTER.run("on-card predict-bars counting stored-model stored-run stored-table", chapter)
    CHAPTER.run("stored-words-facts", chapter)
    largest = max(chapter["sizes"])
    assert largest == 2 * 4096 * 14336 and sum(chapter["sizes"]) > 100 * largest
    assert 0 < chapter["beyond"] <= largest and chapter["beside"]["NF4, double"] < 2 * largest
    assert CHAPTER.verdict("E21", chapter) == "does not hold"


def test_a_nan_fills_a_block_of_the_library_and_codes_cannot_be_trained(chapter):
    CHAPTER.run("bad-library counting stored-model stored-run", chapter)
    assert chapter["spread_to"] == 64
    with pytest.raises(RuntimeError, match="floating point"):
        chapter["weights4"][0].requires_grad_(True)


@pytest.mark.parametrize("number, wrong", [(1, 4.5), (2, 256), (3, 4.127)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    CHAPTER.run({2: "buggy", 3: "on-card predict-bars"}.get(number, ""), chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


def test_the_verdicts_that_need_no_more_runs(patients):
    CHAPTER.run("skewed-run skewed-kinds skewed-table skewed-words-facts", patients)
    assert CHAPTER.verdict("E9", patients) == "holds"
    CHAPTER.run("granularity-run granularity-8", patients)
    assert CHAPTER.verdict("E12", patients) == "holds"
    CHAPTER.run("counting stored-model stored-run stored-table int8-run", patients)
    assert CHAPTER.verdict("E13", patients) == "holds with a condition"


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
