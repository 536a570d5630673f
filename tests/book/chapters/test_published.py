"""The guide's printed runs beside what is simulated of them."""

from types import SimpleNamespace

import pytest

from memlab import find_records
from memlab.book.chapters import published
from memlab.card.step_time import StepTime


def test_a_printed_run_stands_beside_its_simulation(monkeypatch):
    time = StepTime(low=0.1, expected=0.2, high=0.3, parts={}, flops=0, peak_rate=0, samples=4)
    found = SimpleNamespace(peak_reserved=2**33, step_seconds=time, samples_per_second=20.0)
    monkeypatch.setattr(published, "simulate", lambda recipe, gpu: found)
    runs = published.guide_runs("vanilla", "fp16")
    (run,) = (run.figures for run in find_records("published") if run.name == "fp16")
    row = runs.loc["fp16"]
    assert row["simulated"] == 2**33 + run["context_bytes"]
    assert row["ratio"] == row["simulated"] / run["device_used_bytes"]
    assert (row["low"], row["high"]) == pytest.approx((12.8, 38.4))  # 128 steps
    assert row["in time"] == (12.8 <= run["run_seconds"] <= 38.4) and row["consistent"]
    shown = published.guide_table(runs).data
    assert shown["published"].tolist() == (runs["published"] / 2**20).tolist()
    assert shown["estimated s"]["fp16"] == "13–38"


def test_a_run_that_nobody_printed_is_refused():
    with pytest.raises(KeyError, match="nobody"):
        published.guide_runs("nobody")
