"""Runs that others measured on a T4: what is kept is what the simulation says, and how near."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "t4.py"
spec = importlib.util.spec_from_file_location("t4", SCRIPT)
t4 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(t4)
RUNS = json.loads(t4.FILE.read_text(encoding="utf8"))["runs"]


@pytest.mark.parametrize(
    ("base", "attention"), [("none", "eager"), ("none", "sdpa"), ("nf4", "sdpa")]
)
def test_the_simulation_says_what_is_kept(base, attention):
    some = [r for r in RUNS if (r["base"], r["attention"]) == (base, attention)]
    smallest = min(some, key=lambda run: run["measured"]["peak_allocated"])
    assert t4.simulated(smallest) == smallest["simulated"]


def test_without_a_base_allocated_is_exact_and_reserved_nearly():
    exact = [run for run in RUNS if run["base"] == "none"]
    assert len(exact) == 20
    assert max(map(abs, t4.errors(exact, "peak_allocated"))) < 1e-6
    reserved = [abs(error) for error in t4.errors(exact, "peak_reserved")]
    assert sorted(reserved)[len(reserved) // 2] < 0.005 and max(reserved) < 0.01


def test_with_nf4_allocated_is_near_and_reserved_a_matter_of_loading():
    four = [run for run in RUNS if run["base"] == "nf4"]
    assert len(four) == 41
    allocated, reserved = (
        sorted(abs(error) for error in t4.errors(four, kind))
        for kind in ("peak_allocated", "peak_reserved")
    )
    assert allocated[20] < 0.0025 and allocated[-1] < 0.0105
    assert reserved[20] < 0.03 and reserved[-1] < 0.16
