"""Traces that come with memlab: of today's format, and used where they hold."""

import dataclasses
import json
import lzma
import random
import re
import subprocess
import sys

import pytest
import record_traces
import torch
import transformers
from contents import ROOT
from transformers.models.gemma3 import modeling_gemma3

from memlab import Recipe, libraries, plan
from memlab.gpus import find_gpu
from memlab.libraries import LIBRARIES
from memlab.predict import shipped as module
from memlab.predict import store, trace_recorder
from memlab.predict.shipped import Shipped
from memlab.predict.structure import structures
from memlab.predict.trace_recorder import are_alike
from memlab.predict.traces import (
    Traces,
    keys_of,
    traces,
    usual_sizes,
)

RECIPE = Recipe("gpt2", seq_len=64, precision="fp16-amp", attention="sdpa")


@pytest.fixture
def nothing_read():
    """Nobody has asked for a trace in this process yet."""
    known = Shipped.of_memlab, traces
    for one in known:
        one.cache_clear()
    yield
    for one in known:
        one.cache_clear()


def test_they_are_of_todays_format():
    """Else `python tools/record_traces.py` makes them so."""
    assert Shipped().is_of_this_format


@pytest.mark.parametrize("seed", range(2))
def test_they_are_what_is_recorded_today(seed):
    draw = random.Random(seed)
    model, gpu = draw.choice([("bert-base", "T4"), ("qwen2.5-1.5b", "A100-80GB")])
    way = {"precision": "fp16-amp", "lora_rank": draw.choice((0, 8)), "attention": "sdpa"}
    recipe, card = usual_sizes(Recipe(model, seq_len=64, **way)), find_gpu(gpu)
    keys = keys_of(recipe, *next(structures(recipe, card)))
    found, known = Traces(), {}
    fresh = found.halves_of(recipe, card).halves
    for key, half in zip(keys, fresh, strict=True):
        Shipped.of_memlab().read_into(known, key)
        assert store.text_of(dataclasses.replace(known[key], largest=None)) == store.text_of(half)


@pytest.mark.slow
def test_more_of_them_are_what_is_recorded_today():
    if Shipped().others_of(Recipe("gpt2", lora_rank=8, base="nf4", precision="bf16-amp")):
        pytest.skip("with other releases a run decides whether the traces hold")
    tool = [sys.executable, record_traces.__file__, "--check", "60", "--seed", "1"]
    checked = subprocess.run(tool, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("model", "gpu"), [("flan-t5-base", "RTX-4090"), ("gemma-3-270m", "A100-80GB")]
)
def test_a_plan_for_a_model_that_is_slow_to_record_records_nothing(
    model, gpu, nothing_read, monkeypatch, tmp_path
):
    assert model in record_traces.SLOW
    if Shipped().others_of(Recipe(model, precision="bf16-amp", lora_rank=8, base="nf4")):
        pytest.skip("with other releases a run decides whether the traces hold")
    monkeypatch.setenv(libraries.FOLDER, str(tmp_path))
    monkeypatch.setattr(trace_recorder, "record", None)
    assert plan(model, gpu, seq_len=2048)


def test_another_release_of_transformers_finds_them():
    """Gemma 3 270M's one key head makes its whole config part of the structure."""
    recipe = Recipe("gemma-3-270m", attention="sdpa")
    passes, _ = next(structures(recipe, find_gpu("A100-80GB")))
    assert "hidden_size" in passes.key and transformers.__version__ not in passes.key


@pytest.fixture
def other_torch(monkeypatch, nothing_read, tmp_path):
    """Another release of torch is here than the one they were recorded with, and no cache."""
    monkeypatch.setenv(libraries.FOLDER, str(tmp_path))
    here = Shipped().versions | {"torch": "2.11.0"}
    monkeypatch.setattr(store, "installed", lambda: here)
    store._surroundings.cache_clear()
    yield tmp_path
    store._surroundings.cache_clear()


def test_of_other_releases_a_run_decides_whether_they_hold(other_torch, monkeypatch):
    """One shallow run for both halves, and none in the next process: what holds is kept."""
    ran, run = [], trace_recorder.shallow_log
    monkeypatch.setattr(
        trace_recorder,
        "shallow_log",
        lambda *given, **named: ran.append(1) or run(*given, **named),
    )
    deep = Recipe("bert-large", precision="fp16-amp", attention="sdpa")
    first = traces().log(deep, find_gpu("T4"))
    assert len(ran) == 1 and len(list(other_torch.rglob("*.gz"))) == 2
    traces.cache_clear()
    assert are_alike(traces().log(deep, find_gpu("T4")), first) and len(ran) == 1


def holds(model, card, **values):
    """Whether a shallow run confirms a model's shipped traces of LoRA or of full fine-tuning."""
    values |= {"optimizer": "adamw_torch_fused", "max_grad_norm": 1.0, "attention": "sdpa"}
    recipe = usual_sizes(Recipe(model, precision="bf16-amp", **values))
    of_halves = next(structures(recipe, card))
    keys, shipped = keys_of(recipe, *of_halves), {}
    for key in keys:
        Shipped.of_memlab().read_into(shipped, key)
    return trace_recorder.is_as_run(recipe, card, of_halves, [shipped[key] for key in keys])


@pytest.mark.parametrize("backwards", [False, True])
def test_they_hold_in_whatever_order_a_set_is(backwards, monkeypatch):
    """Gemma 3 makes the angles of its two kinds of layers in the order of a set of strings."""

    def in_order(items):
        return sorted(dict.fromkeys(items), reverse=backwards)

    if Shipped().others_of(Recipe("gemma-3-270m")):
        pytest.skip("with other releases a run decides whether the traces hold")
    monkeypatch.setattr(modeling_gemma3, "set", in_order, raising=False)
    assert holds("gemma-3-270m", find_gpu("A100-80GB"))


def test_they_hold_for_models_that_differ_in_the_kind_of_rotary_positions():
    """Llama 3.1's traces are those of Llama 3, which makes fewer small tensors at first."""
    assert holds("llama-3.1-8b", find_gpu("A100-80GB"), lora_rank=8, base="half")


def test_what_does_not_hold_is_recorded_anew(other_torch, monkeypatch):
    """As with a release whose dropout keeps a copy of its input."""
    dropout = torch.nn.functional.dropout

    def wasteful(input, *given, **named):
        return dropout(input * 1.0, *given, **named)

    monkeypatch.setattr(torch.nn.functional, "dropout", wasteful)
    recipe, card = usual_sizes(RECIPE), find_gpu("T4")
    of_halves = next(structures(recipe, card))
    keys, shipped = keys_of(recipe, *of_halves), {}
    for key in keys:
        Shipped.of_memlab().read_into(shipped, key)
    halves = traces().halves_of(recipe, card).halves
    assert halves[0].half.log.order.tolist() != shipped[keys[0]].half.log.order.tolist()
    assert trace_recorder.is_as_run(recipe, card, of_halves, halves)
    assert not trace_recorder.is_as_run(recipe, card, of_halves, [shipped[key] for key in keys])


def test_a_recipe_without_a_trace_takes_away_no_half_of_another():
    """Passes that have none are recorded with updates that others have, too."""
    nothing, half = module.NO_TRACE, "{}"
    kept = record_traces.joined({"passes": nothing, "updates": half}, {"updates": nothing})
    assert kept == {"passes": nothing, "updates": half}
    assert record_traces.joined(kept, {"passes": half, "new": nothing}) == {
        "passes": half,
        "updates": half,
        "new": nothing,
    }


@pytest.mark.parametrize("damage", [b"", b"half a fi", lzma.compress(b"a key\n{}")])
def test_a_damaged_file_is_as_none(damage, tmp_path):
    recipe, card = usual_sizes(RECIPE), find_gpu("T4")
    keys, known = keys_of(recipe, *next(structures(recipe, card))), {}
    for file in module.FOLDER.glob("*"):
        (tmp_path / file.name).write_bytes(damage if file.suffix == ".xz" else file.read_bytes())
    for key in keys:
        Shipped(tmp_path).read_into(known, key)
        assert key in Shipped() and key not in Shipped(tmp_path)
    assert not known


def test_of_another_format_they_are_not_used(monkeypatch):
    recipe, card = usual_sizes(RECIPE), find_gpu("T4")
    keys = keys_of(recipe, *next(structures(recipe, card)))
    assert keys[0] in Shipped.of_memlab()
    monkeypatch.setattr(module, "FORMAT", -1)
    assert keys[0] not in Shipped()


def test_kept_answers_are_of_the_libraries_that_the_book_is_tested_with():
    """After an update tools/refresh.py makes them anew."""
    versions = json.loads((ROOT / "memlab" / "data" / "answers.json").read_text())["versions"]
    pins = (ROOT / "requirements.txt").read_text()
    for name in LIBRARIES:
        pinned = re.search(rf"^{name}==(\S+)", pins, re.MULTILINE)[1]
        assert versions[name].partition("+")[0] == pinned
