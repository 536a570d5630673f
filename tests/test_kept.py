"""What a program makes and the repository keeps is what it makes today: `tools/refresh.py`."""

import json
import re

import draw_cover
import pytest
import what_fits
from contents import ROOT

from memlab import Recipe, fits, simulate

FITS = json.loads(what_fits.FILE.read_text())
QUESTIONS, ANSWERS = (
    json.loads((ROOT / "memlab" / "data" / f"{name}.json").read_text())[name]
    for name in ("questions", "answers")
)


def test_the_picture_of_the_readme_is_what_is_simulated():
    svg = draw_cover.COVER.read_text(encoding="utf8")
    stored = json.loads(re.search(r"<dc:description>(.*)</dc:description>", svg).group(1))
    assert list(stored) == list(draw_cover.RECIPES)
    for label in list(stored)[::2]:
        peak = simulate(draw_cover.RECIPES[label]).peak_allocated / 2**20
        assert stored[label] == pytest.approx(peak, rel=0.002), f"{label}: say make cover"


def test_the_page_has_the_table_of_what_fits_where():
    assert f"\n\n{what_fits.table(FITS)}\n\n" in what_fits.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model", "way", "gpu"),
    [
        ("qwen3-8b", "QLoRA", "RTX-3060"),
        ("gemma-3-4b", "LoRA", "RTX-4090"),
        ("llama-3.1-8b", "full", "A100-80GB"),
        ("bert-large", "full", "T4"),
    ],
)
def test_the_table_is_what_is_said_today(model, way, gpu):
    assert FITS[model][way][gpu] == what_fits.answer(model, way, gpu)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("title", ["GPT-2 345M on one V100 with 16 GB", "Llama-2 7B with QLoRA on"])
def test_the_answer_to_a_question_is_what_fits_says(title):
    (asked,) = [one for one in QUESTIONS if one["title"].startswith(title)]
    for size, kept in ANSWERS[asked["url"]].items():
        found = fits(Recipe(batch_size=int(size), **asked["recipe"]), asked["gpu"])
        assert found.footprint.peak_allocated == kept["peak_allocated_bytes"]
        assert bool(found) == kept["fits"] and found.total_memory == kept["total_memory_bytes"]
        # Reserved bytes shift with the order in which Python frees cycles of tensors.
        assert found.needed == pytest.approx(kept["needed_bytes"], rel=5e-3)
