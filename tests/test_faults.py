"""The tool that puts faults into the code: it finds them, names the tests, and tells killed."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import faults  # noqa: E402


@pytest.mark.parametrize(
    "source, kind, changed",
    [
        ("a < 'é'", "comparison", "(a <= 'é')"),
        ("a.b + c", "sign", "(a.b - c)"),
        ("x[0]", "off by one", "x[(1)]"),
        ("x = 0.5", "constant", "x = (1.0)"),
        ("if x:\n    y", "branch", "if (not x):\n    y"),
        ("def f() -> 3:\n    return x", "return", "def f() -> 3:\n    return (None)"),
    ],
)
def test_faults_of_code(source, kind, changed):
    assert [(k, text) for _, k, _, _, text in faults.edits(source)] == [(kind, changed)]


def test_gains_are_turned_outside_of_abs():
    source = "gain = 1 - a / b\nabs(a / b - 1)"
    found = [(kind, after) for _, kind, _, after, _ in faults.edits(source, faults.gains)]
    assert found == [("gain", "(a / b - 1)")]


def test_the_same_seed_draws_the_same_faults_from_every_room():
    one, again = faults.drawn(30, 5), faults.drawn(30, 5)
    assert one == again and len(one) == 30
    assert {"memlab/card", "memlab/trace", "memlab/data", "chapters"} <= {
        str(Path(fault.path).parent) for fault in one
    }
    for fault in one:
        if fault.path.endswith(".py"):
            ast.parse(fault.text)


@pytest.mark.parametrize(
    "path, first",
    [
        ("memlab/trace/allocator.py", "tests/trace/test_allocator.py"),
        ("memlab/data/gpus.json", "tests/test_gpus.py"),
        ("memlab/book/live.py", "tests/book/test_explorer.py"),
        ("memlab/evidence/loops/fitcheck.py", "tests/evidence/test_loops.py"),
        ("chapters/03-anatomy-deeper.ipynb", "tests/chapters/test_anatomy.py"),
    ],
)
def test_the_nearest_tests_come_first(path, first):
    assert faults.tests_of(path)[0] == first


def test_what_fails_with_the_fault_alone_is_its_killer(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "one.py").write_text("def one():\n    return 2 - 1\n")
    test = "from one import one\n\n\ndef test_one():\n    assert one() == 1\n"
    (tmp_path / "tests" / "test_one.py").write_text(test)
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    monkeypatch.setattr(faults, "tracked", lambda: ["one.py", "tests/test_one.py"])
    monkeypatch.setattr(faults, "tests_of", lambda path: ["tests/test_one.py"])
    (tmp_path / "copy").mkdir()
    tree = faults.Tree(tmp_path / "copy")
    (sign,) = (one for one in faults.in_code("one.py") if one.kind == "sign")
    assert tree.judge(sign, 60) == "tests/test_one.py::test_one"
    same = faults.Fault("one.py", 2, "sign", "2 - 1", "1 + 0", "def one():\n    return 1 + 0\n")
    assert tree.judge(same, 60) == ""
