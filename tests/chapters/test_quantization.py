"""Chapter 12: its formulas are the libraries', its comparisons hold, its refusals are clear."""

import inspect
import statistics

import pytest
import torch
from notebook import Notebook
from transformers import AwqConfig, GPTQConfig, Trainer, TrainingArguments

from memlab.book.chapters import quantization
from memlab.book.chapters.patients import error
from memlab.book.chapters.quantization_formats import (
    E2M1,
    awq,
    bits_on_average,
    formats,
    gptq,
    nearest,
    weight_bytes,
)

CHAPTER, DEEPER = Notebook("12-quantization"), Notebook("12-quantization-deeper")
SETUP = """imports affine symmetric bits by-hand-shown granularity-rounded nf4-table nf4-figure
    blockwise-code unpacked"""
TOOLS = """imports teach-run rounded with-rounded grown schemes schemes-all with-inputs
    harm-of calibrate affine static dynamic integers mixed-product"""


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(SETUP)


@pytest.fixture(scope="module")
def patients(chapter):
    """The chapter's trained models, one for each of three seeds."""
    CHAPTER.run("teach-run", chapter)
    three = chapter["patients"]
    assert len(three.models) == 3 and max(three.base) < 5  # 6.24 is a guess
    return chapter


@pytest.fixture(scope="module")
def deeper():
    """The deeper page's tools and its trained models, one for each of three seeds."""
    return DEEPER.run(TOOLS + " ranges ways")


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


def test_asymmetric_wins_where_the_data_is_skewed(chapter):
    skewed = CHAPTER.run("skewed-run", chapter)["skewed"]
    blocks = "normal, blocks of 64"
    for bits in (8, 4):
        ratio = skewed[f"{bits}: asymmetric"] / skewed[f"{bits}: symmetric"]
        assert ratio.drop(["normal", blocks]).max() < 0.7 < 0.9 < ratio["normal"] < 1
    assert ratio[blocks] < 0.9  # with 4 bits


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


def test_a_small_model_pays_more_bits_a_weight_than_a_large_one(chapter):
    names = "llama-3.2-1b", "llama-2-70b"
    small, large = (bits_on_average(name, chapter["double"]) for name in names)
    assert small > large > chapter["double"]


def test_an_outlier_spoils_its_group_only(chapter):
    torch.manual_seed(0)
    crowd = torch.randn(16, 64)
    crowd[3, 5] = 100.0
    others = crowd < 100
    off = {}
    for group in ("tensor", "row", 16):
        back = chapter["rounded"](crowd, 8, group)
        off[group] = error(crowd[others], back[others])
    alone = error(crowd[others], chapter["rounded"](crowd * others, 8, "tensor")[others])
    assert off["tensor"] > 10 * alone and off["tensor"] > 3 * max(off["row"], off[16])


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
    three = deeper["patients"]
    grown = deeper["with_outliers"](three.models[0], 256)
    assert three.loss(grown) == pytest.approx(three.base[0], abs=1e-4)
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
    DEEPER.run("planted published-table published-words-facts", deeper)
    assert DEEPER.verdict("E14", deeper) == "holds with a condition"


def test_finer_groups_store_more_constants_and_lose_less(patients):
    points = CHAPTER.run("granularity-run", patients)["points"]
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
    # Constants in fp32 are not worth blocks of 16, constants in 8 bits are.
    assert points[4, 16, 8][0] < points[4, 64, 32][0] + 0.02
    assert points[4, 16, 8][1] < points[4, 64, 32][1]
    harm_of, rounded = patients["patients"].harm_of, patients["rounded"]
    groups = "tensor", "row", 16
    two = [statistics.fmean(harm_of(lambda w, g=g: rounded(w, 2, g))) for g in groups]
    assert two == sorted(two, reverse=True) and two[0] > 5 * two[1]
    assert max(harm_of(lambda w: rounded(w, 8, "tensor"))) < 0.001


def test_data_makes_more_of_the_same_bits(patients):
    CHAPTER.run("granularity-run data-run", patients)
    _, harmed, outputs = patients["found"]  # outputs: of a layer with a few large input features
    mean = {name: statistics.fmean(values) for name, values in harmed.items()}
    assert mean["GPTQ"] < mean["nearest mark"] / 2
    assert outputs["AWQ"] < 0.7 * outputs["nearest mark"]
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


def test_published_figures_get_worse_with_fewer_bits_and_gain_more_from_data(chapter):
    quality = CHAPTER.run("quality-table", chapter)["quality"]
    assert quality["bits"].is_monotonic_decreasing and quality["more"].is_monotonic_increasing
    won = (quality["perplexity"] - quality["with data"]).dropna()
    assert won.is_monotonic_increasing


def test_static_ranges_are_those_of_the_rows_and_clip_beyond(deeper):
    model, seen = deeper["patients"].models[0], deeper["patients"].seen
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
    DEEPER.run("activations-run activations-table activations-words-facts", deeper)
    DEEPER.run("best-end with-ends clip-run", deeper)
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
    assert DEEPER.verdict("E10", deeper) == "holds with a condition"


def test_the_straight_through_estimator_rounds_forward_and_not_backward(deeper):
    DEEPER.run("ste aware", deeper)
    weight = torch.randn(4, 8, requires_grad=True)
    out = deeper["StraightThrough"]()(weight)
    torch.testing.assert_close(out, deeper["rounded"](weight.detach(), 2))
    out.backward(upstream := torch.randn(4, 8))
    assert torch.equal(weight.grad, upstream)


@pytest.mark.slow
def test_training_for_it_beats_rounding_afterwards_for_each_of_three_seeds(deeper):
    DEEPER.run("ste aware qat-one", deeper)
    for after, control, aware, full in deeper["ends"]:
        assert full < aware < control < after
    gains = [control - aware for _, control, aware, _ in deeper["ends"]]
    assert statistics.fmean(gains) > statistics.stdev(gains)
    DEEPER.run("qat-gains qat-cost", deeper)
    assert deeper["peaks"]["aware"] > deeper["peaks"]["plain"]
    assert DEEPER.verdict("E11", deeper) == "holds with a condition"
    deeper["ends"] = [(after, same, same, full) for after, same, _, full in deeper["ends"]]
    DEEPER.run("qat-gains", deeper)
    assert DEEPER.verdict("E11", deeper) == "does not hold"


def test_stored_in_bytes_computed_in_bf16_and_never_quantized_again(chapter):
    CHAPTER.run("stored-run", chapter)
    assert chapter["same"]
    seen = chapter["counting"].seen
    (products,) = [key for key in seen if key[0] == "gemm_4bit"]
    assert seen[products] == 14  # seven linear layers in each of two
    assert products[2] == "torch.uint8" and products[-1] == "torch.bfloat16"
    # The count is no zero by blindness: an operation that quantizes is seen.
    with quantization.Counting() as counting:
        chapter["bnb"].functional.quantize_4bit(torch.randn(64), quant_type="nf4")
    assert any(key[0].startswith("quantize") for key in counting.seen)


def test_loading_in_4_bits_and_what_the_trainer_says_to_it(chapter, capsys):
    CHAPTER.run("load-saved load-run", chapter)
    assert chapter["loaded"].lm_head.weight.dtype == torch.float32
    assert "'Linear4bit': 14" in capsys.readouterr().out
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(chapter["loaded"], TrainingArguments(chapter["folder"], use_cpu=True))


def test_a_pass_has_room_for_one_unpacked_layer_at_a_time(chapter):
    CHAPTER.run("predict-bars stored-run stored-words-facts", chapter)
    largest = 2 * 4096 * 14336
    fp16, nf4 = map(quantization.beside_weights, chapter["runs"].values())
    assert 0 < nf4 - fp16 <= largest and nf4 < 2 * largest and chapter["requantized"] == 0
    for run in chapter["runs"].values():
        assert run.breakdown["parameters"] > 0.9 * run.peak_tensors
    assert CHAPTER.verdict("E21", chapter) == "does not hold"


def test_a_nan_fills_a_block_of_the_library_and_codes_cannot_be_trained(chapter):
    CHAPTER.run("stored-run", chapter)
    poisoned, bnb = torch.randn(128), chapter["bnb"].functional
    poisoned[3] = float("nan")
    stored, state = bnb.quantize_4bit(poisoned, blocksize=64, quant_type="nf4")
    assert bnb.dequantize_4bit(stored, state).isnan().sum() == 64
    (stored, *_) = (p for p in chapter["twin"].parameters() if p.dtype == torch.uint8)
    with pytest.raises(RuntimeError, match="floating point"):
        stored.requires_grad_(True)


@pytest.mark.parametrize("number, wrong", [(1, 4.5), (2, 256), (3, 4.127)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    CHAPTER.run("buggy" if number == 2 else "", chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


def test_the_verdicts_that_need_no_more_runs(patients):
    CHAPTER.run("skewed-run", patients)
    assert CHAPTER.verdict("E9", patients) == "holds"
    CHAPTER.run("granularity-run", patients)
    assert CHAPTER.verdict("E12", patients) == "holds"
    CHAPTER.run("stored-run int8-run", patients)
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
