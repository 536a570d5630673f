"""What people train in late 2026: every model of the catalogue, in three ways, on seven cards."""

import json
import re
import runpy
from pathlib import Path

import pytest

from memlab import Recipe, fits

MADE = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "what_fits.py"))
TABLE = json.loads(MADE["FILE"].read_text())
ANSWER = re.compile(r"(fits|may fit|does not fit): [\d.]+( to [\d.]+)? GiB")


def test_every_model_has_an_answer_in_each_way_on_each_card():
    assert list(TABLE) == MADE["NAMES"]
    for ways in TABLE.values():
        assert list(ways) == list(MADE["WAYS"])
        assert all(list(of_cards) == list(MADE["CARDS"]) for of_cards in ways.values())


def test_an_answer_is_a_verdict_with_its_bytes_or_one_line_of_refusal():
    said = {text for ways in TABLE.values() for cards in ways.values() for text in cards.values()}
    for text in said:
        assert ANSWER.fullmatch(text) or re.fullmatch(r"refused: [^\n]+", text), text
    assert any(text.startswith("fits") for text in said)


def test_the_page_has_the_table():
    assert MADE["PAGE"].read_text(encoding="utf-8").endswith(f"\n\n{MADE['table'](TABLE)}\n")


def test_a_cell_is_the_first_way_that_fits():
    ways = {
        "full": {"T4": "does not fit: 20.0 to 21.0 GiB"},
        "LoRA": {"T4": "may fit: 13.0 to 15.1 GiB"},
        "QLoRA": {"T4": "fits: 5.0 GiB"},
    }
    assert MADE["cell"](ways, "T4") == "LoRA 15.1?"
    assert MADE["cell"]({"QLoRA": ways["QLoRA"]}, "T4") == "QLoRA 5.0"
    assert MADE["cell"]({"full": ways["full"]}, "T4") == "—"


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


def test_an_a100_trains_8b_in_bf16_as_the_page_says():
    said = re.search(
        r"takes ([\d.]+) GiB with AdamW and ([\d.]+) with 8-bit", MADE["PAGE"].read_text()
    )
    recipe = Recipe(
        "llama-3.1-8b", seq_len=2048, precision="bf16", checkpointing=True, attention="sdpa"
    )
    for optimizer, gib in zip(("adamw_torch_fused", "adamw_8bit"), said.groups(), strict=True):
        answer = fits(recipe.but(optimizer=optimizer), "A100-80GB")
        assert answer and f"{answer.needed / 2**30:.1f}" == gib


def test_an_h200_takes_in_full_what_the_page_says():
    """In fp32 what a B200 has room for; under autocast up to 133 GiB."""
    card, held = MADE["find_gpu"]("H200"), {}
    for name, ways in TABLE.items():
        if ways["full"]["B200"].startswith("fits"):
            held[name] = float(ways["full"]["B200"].split()[-2])
    large = {name: gib for name, gib in held.items() if gib > 110}
    assert large.pop("qwen3.5-9b") > 133  # of which the page says nothing
    assert len(large) == 7
    for name, gib in large.items():
        recipe = MADE["recipe_of"](name, "full", "H200").but(precision="fp32")
        most = max(MADE["formula"](recipe, card).reserved_range) + card.context
        assert most <= MADE["room"](card)
        if gib < 133:
            assert MADE["answer"](name, "full", "H200").startswith("fits")


def test_loading_a_base_takes_what_the_page_says():
    """Today less than the formula's upper end, by threads more."""
    from memlab.evidence.load_orders import simulate_ways

    card = MADE["find_gpu"]("RTX-3060")
    recipe = MADE["recipe_of"]("llama-3-8b", "QLoRA", card.name)
    run = simulate_ways(recipe, card.without_limit())
    assert fits(recipe, card).needed == run.peak_reserved + card.context
    ends = run.peak_reserved, run.reserved_range[1]
    today, threads = (f"{(end + card.context) / 2**30:.1f}" for end in ends)
    page = " ".join(MADE["PAGE"].read_text(encoding="utf-8").split())
    assert f"simulated to take {today} of an RTX 3060, less than the table's 7.8" in page
    assert f"may leave it at {threads}:" in page and "| llama-3-8b | QLoRA 7.8 |" in page
