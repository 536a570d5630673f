"""Rooms of memlab import from the rooms below them."""

import ast
import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_bars_are_text(path):
    """Of a widget a notebook that was saved says "model not found"."""
    assert not re.search(r"tqdm\.(auto|notebook|autonotebook)", path.read_text())
