"""The picture of the README says what the simulator says today."""

import json
import re
import runpy
from pathlib import Path

import pytest

from memlab import simulate

ROOT = Path(__file__).resolve().parents[1]


def test_the_picture_is_up_to_date():
    tool = runpy.run_path(str(ROOT / "tools" / "draw_cover.py"))
    svg = tool["COVER"].read_text(encoding="utf8")
    stored = json.loads(re.search(r"<dc:description>(.*)</dc:description>", svg).group(1))
    assert list(stored) == list(tool["RECIPES"])
    for label in list(stored)[::2]:
        peak = simulate(tool["RECIPES"][label]).peak_allocated / 2**20
        assert stored[label] == pytest.approx(peak, rel=0.002), f"{label}: say make cover"
