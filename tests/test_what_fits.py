"""What people train in late 2026: every model of the catalogue, in three ways, on seven cards."""

import json
import runpy
from pathlib import Path

import pytest

MADE = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "what_fits.py"))
TABLE = json.loads(MADE["FILE"].read_text())


def test_the_page_has_the_table():
    assert f"\n\n{MADE['table'](TABLE)}\n\n" in MADE["PAGE"].read_text(encoding="utf-8")


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
    assert TABLE[model][way][gpu] == MADE["answer"](model, way, gpu)
