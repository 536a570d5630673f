"""Chapter 17 and the page below it: arithmetic, ranks, links, mixtures, and the verdict."""

from types import SimpleNamespace

import pytest
import torch
from notebook import Notebook
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRotaryEmbedding,
)

from memlab import formula, models
from memlab.book import small_config
from memlab.book.chapters.parallel_deeper import rest_of_nf4
from memlab.models import active_parameters

CHAPTER, DEEPER = Notebook("17-parallel"), Notebook("17-parallel-deeper")


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run("imports bytes pipeline-bubble")


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports moe-models")


def test_the_arithmetic_is_that_of_the_paper(chapter):
    ways = ("ddp", "zero1", "zero2", "zero3")
    said = [7.5 * chapter["bytes_a_parameter"](way, 64) for way in ways]
    assert said == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)
    assert chapter["bytes_a_parameter"]("zero3", 16) == 1


@pytest.fixture(scope="module")
def situation(chapter):
    names = CHAPTER.run("situation-run situation-words", chapter)
    peak, usable = names["peak"], names["usable"] / 2**30
    assert peak["one card"] < usable < peak["ddp"] and round(names["doubled"], 2) == 2
    return names


@pytest.mark.slow
def test_the_bytes_that_autocast_holds_are_16_and_split_as_said(situation):
    one, held = situation["held"]["one card"], situation["held"]
    size = situation["runs"]["ddp"].parameters
    parts = [one[part] / size for part in ("parameters", "gradients", "optimizer_states")]
    assert parts == pytest.approx((4, 4, 8), rel=1e-3)
    assert round(held["zero1"]["gradients"] / (4 * size), 2) == 2  # buckets
    assert 2 < held["zero2"]["temporary"] / size < 3  # gathered in bf16


@pytest.mark.slow
def test_a_machine_with_many_ports_hides_what_one_port_waits_for(situation):
    CHAPTER.run("seventy seventy-said links links-said", situation)
    times, run = situation["times"], situation["seventy"]["64 ranks"]
    recipe, log = situation["sizes"]["64 ranks"], situation["deep"]["64 ranks"]
    inside = situation["serve"](recipe, log, situation["h100"], "nvlink").step_seconds.expected
    many, one = (
        times[f"llama-2-70b on 64 H100, zero3, {x}"] for x in ("infiniband-400", "ethernet-100")
    )
    assert many.expected == pytest.approx(inside, rel=0.01) and one.low > 5 * many.high
    assert not [row for row in times if "64" in row and "nvlink" in row]  # it ends at 8
    waits = [time.parts["communication"] / time.expected for time in (many, one)]
    assert waits[0] < 0.02 < 0.5 < waits[1] and run.peak_allocated < 80 * 2**30
    assert abs(situation["sent"][0] / situation["sent"][1] - 1) < 0.02
    eight = [time for name, time in times.items() if " 8 " in name]
    single = situation["runs"]["one card"].step_seconds
    assert min(8 * single.high / time.high for time in eight) < 1  # a slow link: less than one
    pcie = [times[f"{situation['group']}, {way}, pcie"].expected for way in ("ddp", "zero3")]
    assert max(pcie) < 1.34 * min(pcie)  # as the text says: too close to tell apart


@pytest.mark.slow
def test_accumulation_brings_ddp_its_speed_back_and_zero3_little(situation):
    """16 micro-batches a step over PCIe: DDP sends once, ZeRO 3 gathers in each of them."""
    assert "most of the eight cards' speed is back" in CHAPTER.text["links-said-text"]
    one = formula(situation["alone"].but(accumulation=16), situation["roomy"]).step_seconds
    gains = {}
    for way in ("ddp", "zero3"):
        recipe = situation["recipes"][way].but(accumulation=16)
        time = formula(recipe, situation["roomy"], "pcie").step_seconds
        gains[way] = 8 * one.low / time.low, 8 * one.high / time.high
    assert min(gains["ddp"]) > 5 and max(gains["zero3"]) < 2.2


def test_experts_and_checkpoints_are_counted_as_the_pages_say():
    qwen, gpt, llama = map(models.config, ("qwen3-30b-a3b", "gpt-oss-20b", "llama-3.1-8b"))
    with torch.device("meta"):
        whole, other = (models.build(config).num_parameters() for config in (qwen, gpt))
    sizes = qwen.num_hidden_layers, qwen.num_experts, qwen.hidden_size, qwen.moe_intermediate_size
    assert sizes == (48, 128, 2048, 768)
    experts = 48 * 128 * 3 * 2048 * 768
    text = DEEPER.text["small-card"]
    assert f"= {experts / 1e9:.2f} of {whole / 1e9:.2f} billion, of the second 19.11 of" in text
    assert f"of {other / 1e9:.2f}. bitsandbytes" in text
    said = f"({whole / 1e9:.2f} billion weights, {2 * whole / 2**30:.1f} GiB)"
    assert said in CHAPTER.text["mixtral-said-text"]
    assert (llama.num_hidden_layers, llama.hidden_size) == (32, 4096)
    assert "4,096 numbers x 2 bytes = 32 GiB" in DEEPER.text["long-text"]
    assert 32 * 131_072 * 4096 * 2 == 32 * 2**30
    assert "14,336 numbers x 2 bytes = 3.5 GiB each" in DEEPER.text["long-text"]
    assert llama.intermediate_size == 14_336 and 131_072 * 14_336 * 2 == 3.5 * 2**30


def test_a_feed_forward_part_keeps_four_wide_tensors():
    layer = LlamaMLP(small_config("llama-3-8b-tiny", hidden_size=16, intermediate_size=56))
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.zeros(1, 100, 16, requires_grad=True)).sum()
    assert sorted(kept.values()).count(100 * 56) == 4


def test_torchtitans_published_peak_is_above_what_is_allocated(chapter):
    CHAPTER.run("titan", chapter)
    assert all(0.1 < share < 0.2 for share in chapter["less"]) and chapter["worst"] < 0.05


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns_and_hold_what_is_simulated(chapter):
    CHAPTER.run("program program-main run simulated-rank compare compare-said", chapter)
    assert chapter["losses"]["one process"][0] > chapter["losses"]["one process"][-1]
    for way in ("DDP", "FSDP2"):
        assert chapter["losses"][way] == pytest.approx(chapter["losses"]["one process"], rel=1e-5)
    rows, mib = chapter["rows"], 2**20
    assert rows["difference, bytes"]["FSDP2, parameters"] == 0
    allowed = (0.01 * mib * rows["measured here, MiB"]).clip(lower=256)
    assert (rows["difference, bytes"].abs() <= allowed).all()
    moved = [rows["measured here, MiB"][f"{way}, temporary"] for way in ("DDP", "FSDP2")]
    assert moved[0] < moved[1]  # a small model gains little


@pytest.mark.slow
def test_the_launch_that_does_not_shard_is_seen(deeper):
    DEEPER.run("silent-program silent-files silent-run", deeper)
    assert [one["of"] for one in deeper["found"]] == [1, 1]
    said = [one["check_split"] for one in deeper["found"]]
    assert said == [said[0]] * 2 and "holds 4,160 of 4,160 weights" in said[0]


def test_active_parameters_are_those_of_a_dense_model_and_the_routers(deeper):
    dense = deeper["mixture"](1, active=1, width=256)
    total, active = active_parameters(deeper["mixture"](8))
    alone = active_parameters(dense)
    routers = 2 * 64 * (8 - 1)  # of two layers; the dense model has one expert to choose from
    assert alone[0] == alone[1] == active - routers
    assert total - active == 2 * 6 * 3 * 64 * 128  # six idle experts of three matrices


def test_the_stages_of_a_pipeline_wait_less_with_more_micro_batches(chapter):
    bubble = chapter["bubble"]
    assert bubble(4, 1) == 3 / 4 and bubble(8, 64) < 0.1 <= bubble(8, 63) and bubble(1, 5) == 0


@pytest.mark.parametrize("stages, micro_batches", [(4, 6), (8, 64)])
def test_a_schedule_holds_as_many_micro_batches_as_pytorchs(chapter, stages, micro_batches):
    sizes = SimpleNamespace(_num_stages=stages, _n_microbatches=micro_batches)
    for schedule in (ScheduleGPipe, Schedule1F1B):
        first = schedule._get_pipeline_order(sizes)[0]
        held = most = 0
        for action in filter(None, first):
            held += {"FORWARD": 1, "FULL_BACKWARD": -1}.get(action.computation_type.name, 0)
            most = max(most, held)
        name = schedule.__name__.removeprefix("Schedule")
        assert held == 0 and most == chapter["in_flight"](name, stages, micro_batches)


def kept_by_layer(cards):
    """Bytes that one of so many cards keeps of a Llama layer whose two blocks are split."""
    sizes = dict(num_attention_heads=8 // cards, num_key_value_heads=8 // cards, head_dim=16)
    sizes |= dict(hidden_size=128, intermediate_size=512 // cards)
    config = small_config("llama-3-8b-tiny", **sizes)
    config._attn_implementation = "eager"
    layer, kept = LlamaDecoderLayer(config, 0), {}
    weights = {weight.data_ptr() for weight in layer.parameters()}
    x = torch.randn(2, 32, 128, requires_grad=True)
    turned = LlamaRotaryEmbedding(config)(x, torch.arange(32)[None])

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, position_embeddings=turned)
    return sum(kept.values())


def test_tensor_parallelism_divides_activations_inside_of_the_blocks_alone():
    one, two, eight = map(kept_by_layer, (1, 2, 8))
    inside = 2 * (one - two)
    assert eight == pytest.approx(one - inside * 7 / 8, rel=0.01)  # linear in what is split
    assert one - inside > 4 * 2 * 32 * 128 * 4  # four fp32 rows a token stay whole


@pytest.mark.slow
def test_of_a_shard_in_nf4_the_embedding_is_the_larger_rest(deeper):
    DEEPER.run("adapters adapters-said", deeper)
    lora, qlora = deeper["held"].iloc[3:]
    rest = qlora - sum(rest_of_nf4("llama-3.2-1b", 8))
    assert 0 < rest < 10 and deeper["ratio"] < deeper["saved"]  # adapters and norms
    assert deeper["embedding"] > 2 * deeper["scales"]
    split_too = qlora - deeper["scales"] * 7 / 8
    assert 2.2 < lora / qlora < 2.6 < lora / split_too < 3.2


@pytest.mark.parametrize("number, wrong", [(1, 120), (2, 63), (3, 4160)])
def test_an_exercise_knows_right_from_wrong(chapter, capsys, number, wrong):
    CHAPTER.run("buggy", chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


@pytest.mark.parametrize(
    "grown, worked, word",
    [
        ([3.6, 14], [1, 1], "holds with a condition"),
        ([9, 14], [1, 1], "holds"),
        ([3.6, 14], [1, 2], "does not hold"),
        ([2, 3], [1, 1], "does not hold"),
    ],
)
def test_the_verdict_follows_the_figures(chapter, grown, worked, word):
    assert CHAPTER.verdict("B27", chapter | {"grown": grown, "worked": worked}) == word
