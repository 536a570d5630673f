"""Traces that come with memlab: of today's code, and used where they are of today's releases."""

import lzma
import random

import pytest

from memlab import Recipe, formula
from memlab.gpus import find_gpu
from memlab.predict import shipped as module
from memlab.predict import store
from memlab.predict.shipped import Shipped
from memlab.predict.structure import structures
from memlab.predict.traces import Traces, keys_of, traces, traces_of_any_release, usual_sizes

RECIPE = Recipe("gpt2", seq_len=64, precision="fp16-amp", attention="sdpa")


@pytest.fixture
def nothing_read():
    """Nobody has asked for a trace in this process yet."""
    known = Shipped.of_memlab, traces, traces_of_any_release
    for one in known:
        one.cache_clear()
    yield
    for one in known:
        one.cache_clear()


def test_they_are_of_todays_code():
    """Else `python tools/record_traces.py --check 40`, or without `--check`, makes them so."""
    assert Shipped().is_of_this_code


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
        assert store.text_of(known[key]) == store.text_of(half)


def test_of_other_releases_they_serve_the_formula_alone(monkeypatch, nothing_read, tmp_path):
    here = store.installed()
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    monkeypatch.setattr(store, "installed", lambda: here | {"torch": "2.11.0"})
    (assumed,) = formula(RECIPE, "T4").assumptions
    assert f"torch {here['torch']} (here 2.11.0)" in assumed and "bitsandbytes" not in assumed
    monkeypatch.setattr(store, "installed", lambda: {})
    assert "bitsandbytes" in formula(RECIPE.but(optimizer="adamw_8bit"), "T4").assumptions[0]
    assert traces_of_any_release() is not traces()
    assert not list(tmp_path.rglob("*.gz"))  # nothing was recorded


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


def test_of_other_code_they_are_not_used(monkeypatch):
    recipe, card = usual_sizes(RECIPE), find_gpu("T4")
    keys = keys_of(recipe, *next(structures(recipe, card)))
    assert keys[0] in Shipped.of_memlab()
    monkeypatch.setattr(module, "code_digest", lambda: "another")
    assert keys[0] not in Shipped()
