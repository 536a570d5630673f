"""Rooms of memlab import from the rooms below them, and call none above."""

import ast
import functools
import inspect
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from memlab import Recipe, Serving, fits, plan, simulate
from memlab.trace.patches import replacements

ROOT = Path(__file__).parent.parent / "memlab"
BASE = {"fields", "footprint", "gpus", "libraries", "models", "names", "units"}
ROOMS = {
    "spec": BASE,
    "trace": BASE,
    "card": BASE | {"trace"},
    "workloads": BASE | {"spec", "trace"},
    "predict": BASE | {"spec", "trace", "card", "workloads"},
    "export": BASE | {"spec", "workloads"},
    "planner": BASE | {"spec", "trace", "card", "workloads", "predict"},
    "evidence": BASE | {"spec", "trace", "card", "workloads", "predict"},
}
ROOMS["cli"] = {*ROOMS["planner"], "planner", "export", "evidence"}
ROOMS["book"] = {*ROOMS["cli"]}
ROOMS["panels"] = {*ROOMS["cli"], "book"}
FILES = sorted(ROOT.rglob("*.py"))


def imported(tree: ast.Module) -> set[str]:
    """The rooms and modules of memlab's root that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "memlab":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memlab."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("memlab.")]
            found |= {name.split(".")[1] for name in names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_below_it(room):
    for path in sorted((ROOT / room).rglob("*.py")):
        outside = {name for name in imported(ast.parse(path.read_text())) if name != room}
        assert outside <= ROOMS[room], path.relative_to(ROOT)


def test_every_folder_with_code_is_a_room():
    folders = {path.relative_to(ROOT).parts[0] for path in FILES if path.parent != ROOT}
    assert folders == set(ROOMS)
    modules = {path.stem for path in FILES if path.parent == ROOT}
    assert modules == BASE | {"__init__"} and len(modules) <= 8


def test_bars_are_text():
    """Of a widget a notebook that was saved says "model not found"."""
    for path in FILES:
        assert not re.search(r"tqdm\.(auto|notebook|autonotebook)", path.read_text()), path


@functools.cache
def room_of(file: str) -> str | None:
    """The room or root module of memlab that a file is of; None for another's."""
    path = Path(file)
    inside = path.is_relative_to(ROOT)
    return path.relative_to(ROOT).parts[0].removesuffix(".py") if inside else None


def code_of(value) -> set:
    """The code of what stands in place of another package's name: a function, or a class."""
    if isinstance(value, type):
        return set().union(*map(code_of, vars(value).values()))
    value = getattr(value, "fget", None) or getattr(value, "func", value)
    value = getattr(value, "__func__", value)
    return {value.__code__} if hasattr(value, "__code__") else set()


FROM_C = {"__torch_function__", "__torch_dispatch__", "__class__"}  # PyTorch and Python call them


def calls_upward(function) -> Counter:
    """What rooms call of rooms above them while a function runs, but where they call PyTorch."""
    found = Counter()

    def note(frame, event, argument):
        if event != "call":
            return
        above = room_of(frame.f_code.co_filename)
        if above is None or frame.f_code.co_name in FROM_C:
            return
        room = room_of(frame.f_back.f_code.co_filename)
        if above == room or above in ROOMS.get(room, {above}):
            return
        stand_ins = (inspect.getattr_static(one.target, one.name) for one in replacements())
        if frame.f_code not in set().union(*map(code_of, stand_ins)):
            found[room, frame.f_back.f_code.co_qualname, above, frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


FROZEN = {"seq_len": 64, "freeze": ("backbone",), "task": "sequence-classification"}
TINY = {"model": "llama-3-8b-tiny", "seq_len": 64, "attention": "sdpa", "precision": "fp16"}
QLORA = {"base": "nf4", "lora_rank": 8, "checkpointing": "non-reentrant"}
ASKED = {
    "a 4-bit base": lambda: simulate(Recipe(**TINY, **QLORA), "T4"),
    "two ranks": lambda: simulate(Recipe(**TINY, ranks=2, sharding="zero3"), "T4"),
    "generation": lambda: simulate(Serving("llama-3-8b-tiny"), "T4"),
    "a trace": lambda: fits(Recipe("gpt2-medium", **FROZEN), "T4"),
    "a plan": lambda: plan("gpt2-tiny", "T4", seq_len=64, ways="full", precisions="fp16-amp"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_room_calls_none_above_it(asked):
    """Also by a base class whose methods are overridden, and by functions that it was given."""
    assert calls_upward(ASKED[asked]) == {}
