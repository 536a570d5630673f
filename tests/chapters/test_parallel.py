"""Chapter 17 and the page below it: arithmetic, ranks, links, mixtures, and the verdict."""

from types import SimpleNamespace

import pytest
import torch
from notebook import Notebook
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from memlab.book import small_config
from memlab.models import active_parameters

CHAPTER, DEEPER = Notebook("17-parallel"), Notebook("17-parallel-deeper")


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run("imports bytes pipeline-bubble")


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports moe-models moe-judged")


def test_the_arithmetic_is_that_of_the_paper(chapter):
    said = [7.5 * chapter["bytes_a_parameter"](way, 64) for way in ("ddp", "zero1", "zero2")]
    assert said == pytest.approx([120, 31.4, 16.6], rel=0.01)
    assert chapter["bytes_a_parameter"]("zero3", 16) == 1


@pytest.fixture(scope="module")
def situation(chapter):
    return CHAPTER.run("situation-run situation-words", chapter)


@pytest.mark.slow
def test_the_lines_of_the_figure_are_the_bytes_that_autocast_holds(situation):
    CHAPTER.run("curve-figure curve-said", situation)
    one, size, parts = situation["held"]["one card"], situation["size"], situation["AMP"]
    held = [one[part] / size for part in ("parameters", "gradients", "optimizer_states")]
    assert held == pytest.approx(parts, rel=1e-3)
    lines = [situation["bytes_a_parameter"](way, 8, parts) for way in situation["WAYS"]]
    assert lines == [16, 9, 5.5, 2]
    # FSDP2's `zero2` splits parameters as well; in bf16 it is below ZeRO 2's own line.
    assert situation["held"]["zero2"]["parameters"] < 4 * size / 7


@pytest.mark.slow
def test_a_machine_with_many_ports_hides_what_one_port_waits_for(situation):
    CHAPTER.run("panel seventy links links-said", situation)
    seconds = situation["gains"]["s a step"]
    recipe, log = situation["sizes"]["64 ranks"], situation["deep"]["64 ranks"]
    inside = situation["seconds_over"]("nvlink", recipe, log, situation["h100"]).expected
    assert seconds["70B on 64 H100, zero3, infiniband-400"] == pytest.approx(inside, rel=0.01)
    assert seconds["70B on 64 H100, zero3, ethernet-100"] > 5 * inside
    assert not [row for row in seconds.index if "64" in row and "nvlink" in row]  # it ends at 8


def test_torchtitans_published_peak_is_above_what_is_allocated(chapter):
    CHAPTER.run("titan titan-said", chapter)
    assert all(0.1 < share < 0.2 for share in chapter["less"])


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns_and_hold_what_is_simulated(chapter):
    CHAPTER.run("folder program program-main run simulated-rank compare compare-said", chapter)
    assert chapter["losses"]["one process"][0] > chapter["losses"]["one process"][-1]
    assert chapter["rows"]["FSDP2, parameters"]["difference, bytes"] == 0


@pytest.mark.slow
def test_the_launch_that_does_not_shard_is_seen(deeper):
    DEEPER.run("folder silent-program silent-files silent-run", deeper)
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
