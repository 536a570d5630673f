"""Orders in which a quantized base is loaded, against transformers' own loader."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from memlab import Recipe, SimulatedGPU, models, simulate
from memlab.card import load_order
from memlab.card.load_order import LEFT_FREE, peak_reserved, reserved_range, ways
from memlab.gpus import find_gpu
from memlab.libraries import import_bitsandbytes
from memlab.predict.run import log_of, two_steps
from memlab.trace.events import Alloc, Free, Marker

import_bitsandbytes("this test")
MiB = 2**20
QLORA = Recipe("llama-3-8b-tiny", seq_len=16, lora_rank=2, base="nf4", precision="bf16")


@pytest.fixture(scope="module")
def log():
    return log_of(QLORA)


def weights_of(log):
    return load_order.by_weight(log)[0]


def births(events):
    return sorted(step.nbytes for _, step in events if type(step) is Alloc)


def highest(events):
    """The most bytes that live at a time."""
    now = most = 0
    for _, step in events:
        if type(step) is Alloc:
            now += step.nbytes
            most = max(most, now)
        elif type(step) is Free:
            now -= step.birth.nbytes
    return most


@pytest.mark.parametrize("model, base", [("llama-3-8b", "nf4"), ("gpt2", "nf4"), ("gpt2", "int8")])
def test_one_by_one_is_what_transformers_does(model, base, tmp_path):
    """Its from_pretrained, run in a simulated GPU, makes the same requests in the same order."""
    recipe = QLORA.but(model=f"{model}-tiny", base=base, compute_dtype="fp16")
    models.build(recipe.model, dtype=torch.float16).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=True)
    if base == "nf4":
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
        )
    with SimulatedGPU("A100-40GB") as simulated:
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=config, device_map="cuda", dtype=torch.float16
        )
        done = [
            (kind == "alloc", nbytes)
            for kind, _, nbytes in simulated.tracer.allocator.trace
            if kind in ("alloc", "free")
        ]
    log = log_of(recipe)
    _, one_by_one, *_ = ways(log, find_gpu("A100-40GB").total_memory)
    _, afterwards = load_order.by_weight(log)
    load = one_by_one[: -len(afterwards)]
    said = [
        (type(step) is Alloc, (step if type(step) is Alloc else step.birth).nbytes)
        for _, step in load
    ]
    assert between_births(said) == between_births(done[: len(said)])


def between_births(events):
    """What is freed between two births, in whatever order, leaves the same behind."""
    rounds = [[]]
    for born, nbytes in events:
        if born:
            rounds.append([nbytes])
        else:
            rounds[-1].append(nbytes)
    return [sorted(sizes) for sizes in rounds if sizes]


def test_every_way_makes_the_same_base(log):
    own, *others = ways(log)
    allocated = {highest(events[events.index((None, Marker.RESET)) :]) for events in (own, *others)}
    assert len(allocated) == 1
    for events in others:
        warmup = events[0][1].nbytes
        assert births(events) == sorted([*births(own), warmup])


def test_the_ends_hold_one_weight_and_all_of_them(log):
    whole = sum(events[0][1].nbytes for *_, events in weights_of(log))
    largest = max(events[0][1].nbytes for *_, events in weights_of(log))
    packed = sum(map(load_order.bytes_to_hold, (events for *_, events in weights_of(log))))
    _, first, *_, last = ([e for e in events if e[0] is not None] for events in ways(log))
    count = sum(len(events) for *_, events in weights_of(log))
    assert highest(last[: count + 2]) >= whole
    assert packed <= highest(first[2 : count + 2]) <= 1.2 * packed + largest


def test_the_warm_up_leaves_room_on_the_card(log):
    _, unlimited, *_ = ways(log)
    _, tight, *_ = ways(log, LEFT_FREE + MiB)
    _, none, *_ = ways(log, LEFT_FREE)
    assert unlimited[0][1].nbytes > MiB == tight[0][1].nbytes
    assert none[0][0] != "warm-up"


def test_a_recipe_is_loaded_as_transformers_does_and_a_moved_model_is_not(log):
    moved, today, *_ = ways(log)
    assert simulate(QLORA).peak_reserved == peak_reserved(today)
    with SimulatedGPU() as card:
        two_steps(QLORA, card)
    assert card.footprint.peak_reserved == peak_reserved(moved)


def test_every_way_is_served_by_segments_that_grow_where_a_recipe_has_them(log):
    moved, today, *_ = ways(log)
    found = simulate(QLORA.but(expandable_segments=True))
    assert found.peak_reserved == peak_reserved(today, expandable_segments=True)
    assert found.reserved_range == reserved_range(log, None, None, expandable_segments=True)
    low, high = found.reserved_range
    assert found.peak_allocated <= low <= found.peak_reserved <= high


def test_a_way_that_runs_out_of_memory_takes_all_there_is(log):
    whole = peak_reserved(list(ways(log))[-1])
    assert peak_reserved(list(ways(log))[-1], 4 * MiB) is None
    assert reserved_range(log, whole - 2 * MiB, None)[1] <= whole - 2 * MiB


@pytest.mark.sampled(1)
@pytest.mark.parametrize("upcast", [True, False])
def test_an_emptied_cache_forgets_most_of_the_loading(upcast, monkeypatch):
    """peft's casts to fp32 end with one, and the Trainer begins so; else the highest way stays."""
    config = models.config("llama-3-8b")
    config.num_hidden_layers, config.vocab_size = 6, 1000
    config.bos_token_id = config.eos_token_id = 1
    recipe = QLORA.but(model=config, upcast=upcast)
    assert Marker.EMPTY_CACHE in log_of(recipe).steps
    emptied = simulate(recipe)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    kept = simulate(recipe)
    for footprint in (kept, emptied):
        low, high = footprint.reserved_range
        assert footprint.peak_allocated <= low <= footprint.peak_reserved <= high
    half = 2 * kept.parameters
    assert kept.reserved_range[1] >= half > emptied.reserved_range[1]


def test_the_range_is_the_same_every_time_and_only_a_base_has_one():
    assert simulate(QLORA).reserved_range == simulate(QLORA).reserved_range
    assert simulate(QLORA.but(base="none")).reserved_range is None
    footprint = simulate(QLORA)
    assert footprint.as_dict()["reserved_range"] == list(footprint.reserved_range)
    assert "peak reserved, as a range: " in str(footprint)
