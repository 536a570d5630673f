"""Ranks that are really run, beside the one that is simulated."""

import functools

import pytest
import torch
import torch.distributed as dist
from helpers import highest, most, refused
from real_ranks import measured, run_ranks, without_dropout
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from memlab import Recipe, SimulatedGPU, measure, simulate
from memlab.footprint import Category
from memlab.predict.run import built
from memlab.workloads.sharding import check_split
from memlab.workloads.training import Training

MODELS = {"gpt2-tiny": 0, "bert-base-tiny": 1, "llama-3-8b-tiny": 3}  # and its first way
WAYS = ("ddp", "zero1", "zero2", "zero3")
# Every fourth, which is the sample, is of another way.
PAIRS = [(model, WAYS[(first + i) % 4]) for model, first in MODELS.items() for i in range(4)]
SEQUENCES = 4  # of all ranks together
BATCH = (Category.INPUTS,)  # left out: among it are gloo's own copies of what it reduces


def recipe(model, sharding, ranks):
    return Recipe(
        model=model,
        batch_size=SEQUENCES // ranks,
        seq_len=32,
        ranks=ranks,
        sharding=sharding if ranks > 1 else "ddp",
    )


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def real(request, tmp_path_factory):
    """real(model, way): the recipe, and (footprint or None, losses) of each of its ranks."""

    @functools.cache
    def run(model, way):
        one = recipe(model, way, request.param)
        return one, run_ranks(one.ranks, measured, one, folder=tmp_path_factory.mktemp("ranks"))

    return run


# What was not in it: micro-batches before the last, quantized weights and states, and states that
# each step makes anew (Adafactor's RMS).
MORE = [
    recipe("gpt2-tiny", "ddp", 2).but(accumulation=3),
    recipe("gpt2-tiny", "zero3", 2).but(accumulation=3),
    recipe("llama-3-8b-tiny", "zero1", 2).but(optimizer="adamw_8bit"),
    recipe("llama-3-8b-tiny", "zero1", 2).but(optimizer="adafactor"),
    recipe("llama-3-8b-tiny", "ddp", 2).but(base="nf4", lora_rank=4, optimizer="adamw_8bit"),
    recipe("llama-3-8b-tiny", "zero3", 2).but(base="nf4", lora_rank=4, double_quant=True),
]


def simulated(one):
    """The footprint of the same loop as rank 0 under the CPU's own rules."""
    with SimulatedGPU(rules=frozenset(), ranks=one.ranks) as gpu:
        training = built(one, gpu)
        without_dropout(training)
        for _ in range(3):
            gpu.reset_peak()
            training.step()
    return gpu.footprint


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("model", "sharding"), PAIRS)
def test_a_simulated_rank_holds_what_a_real_one_holds(real, model, sharding):
    assert_simulated(*real(model, sharding))


@pytest.mark.slow
def test_a_copy_of_a_split_model_holds_what_a_real_one_holds(tmp_path):
    """Two copies among four ranks."""
    one = recipe("llama-3-8b-tiny", "zero3", 4).but(replicas=2)
    assert_simulated(one, run_ranks(4, measured, one, folder=tmp_path))


def test_copies_of_a_split_model_send_between_machines_what_they_add_up():
    """Two machines, each with a copy: a card sums its eighth of the gradients, in bf16."""
    one = Recipe("llama-3-8b-tiny", precision="bf16-amp", ranks=16, sharding="zero3", replicas=2)
    ours, eight, whole = (
        simulate(other, "H100", link="ethernet-10")
        for other in (one, one.but(ranks=8, replicas=1), one.but(replicas=1))
    )
    assert ours.breakdown == eight.breakdown
    # The cast to fp32 runs on the stream of the all-reduce, which has a small segment of its own.
    assert ours.peak_reserved - eight.peak_reserved == 2 * 2**20
    summed = 2 * ours.parameters // 8
    more = ours.step_seconds.sent - eight.step_seconds.sent
    assert more == pytest.approx(summed, rel=0.01)
    # At worst nothing is sent beside the kernels.
    assert ours.step_seconds.high < 0.8 * whole.step_seconds.high


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one", MORE, ids=lambda one: f"{one.sharding}-{one.optimizer}-{one.base}")
def test_what_else_a_rank_does_is_simulated_too(one, tmp_path):
    ranks = run_ranks(2, measured, one, folder=tmp_path)
    assert_simulated(one, ranks)
    whole = one.but(ranks=1, sharding="ddp", batch_size=SEQUENCES)
    losses = torch.tensor([losses for _, losses in ranks])
    assert losses.mean(0).tolist() == pytest.approx(measured(whole)[1], rel=1e-5)


def assert_simulated(one, ranks):
    """The first of some ranks, as (footprint, losses), holds what the simulated one holds."""
    (phase, there), (simulated_phase, here) = (
        highest(footprint.timeline, BATCH) for footprint in (ranks[0][0], simulated(one))
    )
    assert simulated_phase == phase
    for category in ("parameters", "gradients"):
        assert here[category] == there[category], category
    # AdamW's count of the steps, 4 bytes per weight, lies on the host; 8-bit states have none.
    counts = there["optimizer_states"] - here["optimizer_states"]
    assert 0 <= counts < 4 * 64 and counts % 4 == 0
    assert (counts > 0) == one.optimizer.startswith("adamw_torch")
    for category in ("activations", "temporary"):
        assert here[category] == pytest.approx(there[category], rel=0.01, abs=64), category


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
def test_ranks_learn_what_one_process_learns_from_the_whole_batch(real, model):
    alone = measured(recipe(model, "ddp", 1))[1]
    assert alone[0] > alone[-1]
    for way in WAYS:
        losses = torch.tensor([losses for _, losses in real(model, way)[1]])
        assert losses.mean(0).tolist() == pytest.approx(alone, rel=1e-5), way


def test_the_simulated_rank_holds_what_pytorchs_own_tracker_of_fsdp_counts():
    """On real tensors and the fake group: by FSDPMemTracker, what belongs to whom at the peak."""
    one = recipe("llama-3-8b-tiny", "zero3", 4).but(batch_size=2, seq_len=64)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        training = Training(one)
        training.step()
        training.step()
        tracker = FSDPMemTracker(training.model, training.optimizer)
        tracker.track_inputs(tuple(training.inputs))
        with tracker:
            training.step()
    finally:
        dist.destroy_process_group()
    (counted,) = tracker.get_tracker_snapshot("peak").values()
    counted = {getattr(name, "name", name): nbytes for name, nbytes in counted.items()}
    _, here = highest(simulated(one).timeline, BATCH)
    assert here["parameters"] == counted["SHARDED_PARAM"]
    assert here["gradients"] == counted["SHARDED_GRAD"]
    assert here["activations"] == counted["ACT"]
    in_flight = "UNSHARDED_PARAM", "UNSHARDED_GRAD", "ALL_GATHER", "REDUCE_SCATTER", "TEMP"
    assert here["temporary"] == sum(counted[name] for name in in_flight)
    counts = counted["OPT"] - here["optimizer_states"]  # of the steps, on the host
    assert counts == 4 * len(list(training.model.parameters()))


# ---------------------------------------------------------------------- recipes

FOUR = recipe("gpt2-tiny", "zero3", 4)


def test_a_verb_of_one_rank_says_so():
    with refused("ranks is 4"):
        measure(FOUR)


def test_the_more_is_split_the_less_a_rank_holds_and_it_sends_what_a_ring_needs():
    """Twice 3 / 4 of the gradients: by an all-reduce, or a reduce-scatter and a gather or two."""
    found = [simulate(FOUR.but(sharding=way), "A100-40GB") for way in WAYS]
    peaks = [footprint.peak_tensors for footprint in found]
    assert peaks == sorted(peaks, reverse=True)
    ddp, zero1, zero2, zero3 = (footprint.breakdown for footprint in found)
    assert ddp["parameters"] == zero1["parameters"] == 4 * zero3["parameters"]
    assert zero2["parameters"] == zero3["parameters"]
    assert ddp["optimizer_states"] == 4 * zero3["optimizer_states"] > zero1["optimizer_states"]
    sent = [footprint.step_seconds.sent / ddp["parameters"] for footprint in found]
    assert [sent[0], *sent[2:]] == [1.5, 1.5, 2.25]


@pytest.mark.parametrize("changes", [{"checkpointing": True}, {"base": "nf4"}])
def test_what_adapters_are_on_is_split_and_scales_are_copied(changes):
    lora = FOUR.but(model="llama-3-8b-tiny", lora_rank=4, precision="bf16", **changes)
    split, whole = simulate(lora), simulate(lora.but(sharding="ddp"))
    assert split.trainable_parameters == whole.trainable_parameters < split.parameters
    assert split.parameters == whole.parameters
    assert 3.5 < whole.breakdown["parameters"] / split.breakdown["parameters"] <= 4


def test_gradients_stay_whole_until_the_last_micro_batch_reduces_them():
    held = [simulate(FOUR.but(accumulation=n), "H100") for n in (1, 3, 5)]
    once, *kept = (most(one, "gradients") for one in held)
    assert kept == [4 * once, 4 * once]
    sent = [one.step_seconds.sent for one in held]
    assert sent[1] - sent[0] == sent[2] - sent[1]  # each gathers twice more
    ddp = [simulate(FOUR.but(sharding="ddp", accumulation=n), "H100") for n in (1, 3)]
    assert ddp[0].step_seconds.sent == ddp[1].step_seconds.sent


@pytest.mark.parametrize(("precision", "nbytes"), [("fp32", 4), ("bf16-amp", 2)])
def test_gradients_wait_in_the_format_of_autocast_as_with_accelerate(precision, nbytes):
    footprint = simulate(FOUR.but(precision=precision, accumulation=3), "H100")
    assert most(footprint, "gradients") == nbytes * footprint.parameters


def test_a_model_that_no_launcher_has_split_is_noticed():
    with SimulatedGPU(ranks=2):
        model = torch.nn.Linear(64, 64, device="cuda")
        with refused("holds 4,160 of 4,160 weights.*is not split"):
            check_split(model, 2)
        check_split(fully_shard(model), 2)
