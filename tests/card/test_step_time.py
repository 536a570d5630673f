"""Seconds of a step: from its work and a card's rates, by depth and whole, beside timed runs."""

from collections import Counter

import pytest
import torch
from helpers import refused

from memlab import Recipe, SimulatedGPU, find_gpu, simulate
from memlab.card.step_time import EXPECTED, busy, step_time
from memlab.footprint import Phase, StepTime
from memlab.predict.run import log_of
from memlab.trace.work import Work

A100 = find_gpu("A100-40GB")


def one(flops=0, dtype="", nbytes=0, again=False):
    return Work(flops, dtype, (), (nbytes,), 0, 0, Phase.FORWARD, again, 0)


def expected(*works):
    return step_time(Counter(works), A100)


def product(flops, dtype="float16", again=False, tiles=108):
    """A product whose result has a whole round of tiles for the A100's processors, or attention."""
    result = (tiles, 128, 128) if tiles else ()
    return Work(flops, dtype, result, (), 0, 0, Phase.FORWARD, again, 0)


def test_a_kernel_takes_the_longest_of_its_three():
    reached = A100.measured["float16"][1]
    found = expected(product(10**15))
    assert found.expected == pytest.approx(10**15 / (reached * EXPECTED.products))
    found = expected(product(10**15, tiles=0))  # fused attention has no tiles
    assert found.expected == pytest.approx(10**15 / (reached * EXPECTED.attention))
    hopper = step_time(Counter([product(10**15, "bfloat16", tiles=0)]), find_gpu("H100"))
    assert 10**15 / hopper.expected == pytest.approx(0.35 * 989.4e12, rel=0.01)  # Shah et al.
    copy = expected(one(nbytes=10**12))
    assert copy.expected == pytest.approx(10**12 / (1555e9 * 0.76))
    assert copy.parts["memory traffic"] == copy.expected
    tiny = step_time(Counter({one(nbytes=8): 1000}), A100)
    assert tiny.expected == pytest.approx(1000 * EXPECTED.forward)  # the host is slower
    assert tiny.parts["waiting for launches"] == pytest.approx(
        1000 * (EXPECTED.forward - EXPECTED.kernel)
    )


def test_what_fits_in_half_of_the_cache_comes_from_there():
    inside, outside = A100.cache // 2, A100.cache // 2 + 1
    far, near = (expected(one(nbytes=n)).parts["memory traffic"] for n in (outside, inside))
    assert far / near == pytest.approx(EXPECTED.cache, rel=1e-6)


def test_states_in_8_bits_take_a_processor_so_many_clocks_an_element():
    recipe = Recipe("llama-2-7b", seq_len=128, precision="bf16", optimizer="adamw_8bit")
    found = simulate(recipe, A100)
    clocks = (found.parameters - 32000 * 4096) * EXPECTED.coded  # the embedding has 32 bits
    parts = found.step_seconds.parts
    assert parts["optimizer"] == pytest.approx(clocks / (108 * A100.clock), rel=0.02)
    fused = simulate(recipe.but(optimizer="adamw_torch_fused"), "A100-80GB").step_seconds.parts
    assert parts["optimizer"] > 4 * fused["optimizer"]  # though it moves fewer bytes


def test_the_host_takes_longer_for_a_weight_with_states_in_8_bits():
    plain, coded = (Work(0, "", (), (), 0, n, Phase.STEP, False, 0) for n in (0, 4096))
    plain, coded = (step_time(Counter({one: 100}), A100).expected for one in (plain, coded))
    assert coded > 4 * plain


def test_parts_sum_to_the_whole_and_the_range_holds_it():
    found = simulate(Recipe("bert-large-tiny", batch_size=2, checkpointing=True), "T4").step_seconds
    assert sum(found.parts.values()) == pytest.approx(found.expected)
    assert found.low < found.expected < found.high
    assert tuple(found.parts) == StepTime.PARTS and found.parts["recomputation"] > 0
    assert found.samples_per_second == pytest.approx(2 / found.expected)
    assert 0 < found.mfu < 1


def test_recomputation_is_no_useful_work():
    again = expected(one(flops=10**15, dtype="float16"), one(10**15, "float16", again=True))
    alone = expected(one(flops=10**15, dtype="float16"))
    assert again.flops == alone.flops and again.mfu == pytest.approx(alone.mfu / 2)


def test_updated_weights_are_sent_when_all_is_done():
    """A step that computes long and sends: beside the passes it is hidden, after the update not."""

    def communication(phase):
        computed = Work(10**13, "bfloat16", (), (), 0, 0, phase, False, 0, 0)
        sent = Work(0, "", (), (), 0, 0, phase, False, 0, 10**8)
        return step_time(Counter([computed, sent]), A100, link="pcie").parts["communication"]

    assert communication(Phase.BACKWARD) == 0
    assert communication(Phase.STEP) > 0


@pytest.mark.parametrize(
    "tiles, processors, share", [(0, 80, 1), (80, 80, 1), (81, 80, 81 / 160), (8, 80, 0.1)]
)
def test_the_last_round_of_tiles_is_seldom_full(tiles, processors, share):
    assert busy(tiles, processors) == pytest.approx(share)


def test_more_micro_batches_take_longer_and_the_optimizer_does_not():
    recipe = Recipe("bert-large-tiny", batch_size=4, seq_len=128)
    one, eight = (simulate(recipe.but(accumulation=n), "T4").step_seconds for n in (1, 8))
    assert eight.flops == 8 * one.flops
    assert eight.parts["optimizer"] == pytest.approx(one.parts["optimizer"])


def test_what_has_no_seconds_says_why_in_one_line():
    recipe = Recipe("bert-large-tiny")
    for card, said in [(None, "a card without a limit has no rates"), (2**33, "name a card")]:
        footprint = simulate(recipe, card)
        assert footprint.step_time is None and footprint.samples_per_second is None
        with refused(said):
            print(footprint.step_seconds)
        assert footprint.as_dict()["step_seconds"] is None
    with SimulatedGPU("T4") as gpu:  # which multiplies bf16 by emulation
        a = torch.empty(8, 8, device="cuda", dtype=torch.bfloat16)
        a @ a
    with refused("T4 has no rate for bfloat16: it has rates for float32"):
        print(gpu.footprint.step_seconds)


def test_a_loop_of_ones_own_has_seconds_too():
    with SimulatedGPU("L4") as gpu:
        model = torch.nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.empty(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = gpu.footprint.step_seconds
    assert found.samples is None and found.samples_per_second is None
    assert found.flops == 2 * 2 * 64 * 512 * 512  # its input needs no gradient


def test_quantized_layers_write_their_weights_out():
    recipe = Recipe("llama-3.2-1b-tiny", seq_len=256, precision="bf16", lora_rank=4)
    plain, nf4 = (log_of(recipe.but(base=base), find_gpu("L4")).work for base in ("none", "nf4"))
    moved = [sum(one.nbytes * times for one, times in work.items()) for work in (plain, nf4)]
    assert moved[1] > moved[0]
    int8 = log_of(recipe.but(base="int8", precision="fp16"), find_gpu("L4")).work
    assert any(one.dtype == "int8" for one in int8)


def test_tf32_counts_where_it_is_allowed_when_it_is_asked():
    """A kept trace does not know whether it was allowed, and gives both."""
    recipe = Recipe("bert-large", batch_size=2, seq_len=256)
    matmul = torch.backends.cuda.matmul
    before, seconds = matmul.fp32_precision, {}
    try:
        for name, value in (
            ("allow_tf32", False),
            ("allow_tf32", True),
            ("allow_tf32", False),
            ("fp32_precision", "tf32"),
            ("fp32_precision", "ieee"),
        ):
            setattr(matmul, name, value)
            allowed = value in (True, "tf32")
            for card in ("A100-80GB", "V100"):
                found = simulate(recipe, card).step_seconds.parts["matrix products"]
                seconds.setdefault((card, allowed), set()).add(found)
    finally:
        matmul.allow_tf32, matmul.fp32_precision = False, before
    assert all(len(found) == 1 for found in seconds.values())
    assert min(seconds["A100-80GB", True]) < min(seconds["A100-80GB", False]) / 2
    assert seconds["V100", True] == seconds["V100", False]  # it has none
