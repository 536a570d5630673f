"""Measuring on the device that is here, and the CUDA branch with a real allocator's counters."""

import contextlib
import gc

import pytest
import torch
from helpers import refused
from standin_card import stand_in

from memlab import Meter, MiB, Recipe, measure
from memlab.footprint import Footprint
from memlab.predict.measure import allocator_of, pick_device, require, with_breakdown
from memlab.workloads.training import Training

TINY = Recipe(model="bert-large-tiny", batch_size=2, seq_len=32)


def test_bytes_of_the_states_are_exact():
    result = measure(TINY, "cpu", steps=2)
    nbytes = 4 * result.footprint.parameters
    assert result.footprint.breakdown["parameters"] == nbytes
    assert 0 <= result.footprint.breakdown["optimizer_states"] - 2 * nbytes < 4096
    assert sum(result.footprint.breakdown.values()) == result.footprint.peak_allocated


def test_the_same_call_gives_the_same_bytes():
    first, second = (measure(TINY, "cpu", steps=1).footprint for _ in range(2))
    assert first == second


def test_times_are_ordered_and_samples_follow():
    result = measure(TINY.but(accumulation=3), "cpu", steps=3)
    seconds = result.step_seconds
    assert 0 < seconds["lower_quartile"] <= seconds["median"] <= seconds["upper_quartile"]
    assert result.samples_per_second == pytest.approx(6 / seconds["median"])


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="PyTorch 2.11 does not say how its allocator is set",
)
@pytest.mark.parametrize("before", ["", "max_split_size_mb:100", "expandable_segments:True"])
def test_a_measurement_sets_the_allocator_and_puts_it_back(before):
    said = torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)
    grow, cuda = TINY.but(expandable_segments=True), torch.device("cuda")
    try:
        with allocator_of(TINY, cuda), allocator_of(grow, torch.device("cpu")):
            assert said() == before
        with allocator_of(grow, cuda):
            assert said().endswith("expandable_segments:True")
        off = "" if "expandable" in before else "expandable_segments:False"
        assert said() == ",".join(filter(None, (before, off)))
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize("before", ["", "max_split_size_mb:100", "expandable_segments:True"])
def test_an_allocator_that_does_not_tell_is_as_the_environment_says(before, monkeypatch):
    told = []  # PyTorch 2.11 has the one name without the other
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", before)
    with allocator_of(TINY.but(expandable_segments=True), torch.device("cuda")):
        pass
    on = ",".join(filter(None, (before, "expandable_segments:True")))
    off = before if "expandable" in before else on.replace("True", "False")
    assert told == [on, off]


def test_meter_counts_what_was_there_and_is_touched():
    x = torch.zeros(1000)
    with Meter("cpu") as meter:
        y = x + 1
    assert meter.footprint.peak_allocated == x.nbytes + y.nbytes


def test_meter_lets_errors_through_and_still_reports():
    meter = Meter("cpu")
    with pytest.raises(KeyError), meter:
        kept = torch.zeros(1000)
        raise KeyError
    assert meter.footprint.peak_allocated == kept.nbytes


def test_meter_says_what_was_alive_a_storage_once():
    gc.collect()
    leftover = torch.zeros(3_000_000)
    same = leftover.view(-1)
    with Meter("cpu") as meter:
        pass
    assert meter.already_there.count((same.nbytes, "Tensor [3000000] torch.float32")) == 1


def test_cuda_figures_come_from_the_counters():
    def on_card(mebibytes):
        return torch.empty(mebibytes * MiB, dtype=torch.uint8, device="cuda")

    with stand_in("T4") as card:
        weights = on_card(100)
        for emptied, reserved in ((True, 170), (False, 190)):
            torch.cuda.empty_cache()
            on_card(90)  # and let go: in the cache from before
            with Meter("cuda", empty_cache=emptied) as meter:
                held = [on_card(30), on_card(40)]
                del held[0]
                held.append(on_card(10))
            footprint = meter.footprint
            assert footprint.peak_allocated == 170 * MiB
            assert footprint.breakdown == {"inputs": weights.nbytes, "temporary": 70 * MiB}
            # Where the cache is emptied, the 30 are used again; else all are cut from the 90.
            assert footprint.peak_reserved == reserved * MiB
            assert footprint.context == card.gpu.context
            assert footprint.device_used == card.gpu.context + reserved * MiB
            del held


def test_the_counters_are_those_of_the_card_that_is_named(monkeypatch):
    asked = []
    for name in (
        *("synchronize", "reset_peak_memory_stats", "memory_allocated", "mem_get_info"),
        *("memory_reserved", "max_memory_allocated", "max_memory_reserved"),
    ):
        result = (3 * MiB, 8 * MiB) if name == "mem_get_info" else MiB
        counter = lambda device=None, result=result: asked.append(device) or result  # noqa: E731
        monkeypatch.setattr(torch.cuda, name, counter)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    second = torch.device("cuda:1")
    with Meter(second) as meter:
        pass
    assert meter.footprint.device_used == 5 * MiB
    assert asked and set(asked) == {second}


def test_a_card_too_full_for_the_traced_step_has_figures_without_breakdown(monkeypatch):
    def no_room():
        raise torch.OutOfMemoryError

    training = Training(TINY)
    monkeypatch.setattr(training, "step", no_room)
    counted = Footprint(10**8, 2 * 10**8, {"temporary": 10**8}, "unknown")
    assert with_breakdown(counted, training) == counted


def test_a_traced_step_shares_out_the_counters_peak():
    training = Training(TINY)
    training.step()
    counted = Footprint(10**8, 2 * 10**8, {"temporary": 10**8}, "unknown")
    explained = with_breakdown(counted, training)
    assert sum(explained.breakdown.values()) == explained.peak_allocated == 10**8
    assert explained.breakdown["parameters"] == 4 * training.parameters
    assert explained.peak_phase == "optimizer step"
    assert explained.peak_reserved == counted.peak_reserved


def test_cuda_is_refused_where_there_is_none():
    if torch.cuda.is_available():
        assert pick_device(None).type == "cuda"
    else:
        with refused("this machine has cpu"):
            measure(TINY, "cuda")


def test_bf16_is_refused_on_a_card_that_emulates_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    adapters = TINY.but(precision="fp16-amp", lora_rank=4, base="nf4")
    for recipe in (TINY.but(precision="bf16-amp"), adapters.but(compute_dtype="bf16")):
        with refused("Tesla T4 has no native bfloat16"):
            require(recipe, torch.device("cuda"))
    require(adapters, torch.device("cuda"))


def test_no_timed_step_is_refused():
    with refused("steps is 0"):
        measure(TINY, "cpu", steps=0)
