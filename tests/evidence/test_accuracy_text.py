"""The summary of errors and the text of the report."""

import pytest
from helpers import a_comparison, a_run

from memlab.evidence.accuracy_text import report, summary


def test_summary_by_family_and_technique_and_never_over_kinds():
    gpu = [a_comparison(100 + error, 100) for error in (1, -2, 3, 0)]
    gpu.append(a_comparison(80, 100, family="encoder", technique="LoRA"))
    paper = a_comparison(200, 100, against="published", figure="device used")
    rows = {(r["against"], r["group"]): r for r in summary([*gpu, paper])}
    whole = rows["NVIDIA L4", "all"]
    assert whole["runs"] == 5 and whole["refused"] == 0
    assert whole["median"] == pytest.approx(0.02)
    assert whole["p95"] == pytest.approx(0.03 + 0.8 * 0.17)
    assert whole["worst_over"] == pytest.approx(0.03)
    assert whole["worst_under"] == pytest.approx(-0.2)
    assert rows["NVIDIA L4", "decoder"]["worst_under"] == pytest.approx(-0.02)
    assert rows["NVIDIA L4", "LoRA"]["median"] == pytest.approx(0.2)
    assert rows["published", "all"]["runs"] == 1
    text = report([*gpu, paper], [])
    assert "2 figures miss" in text and "against published" in text
    assert "-20.00%" in text and "+100.00%" in text


def test_the_report_says_whether_a_gpu_is_on_record():
    on_gpu, on_cpu = a_run({"step_seconds": 1.0}), a_run({"step_seconds": 1.0}, "CPU (arm64)")
    published = a_run({"step_seconds": 1.0}, kind="published")
    assert report([], [on_cpu, published]).startswith("No GPU has been recorded yet")
    assert "No GPU" not in report([], [on_cpu, on_gpu])
