"""One table for a recipe: full size predicted, the twin or the card measured, records beside."""

import sys

import pytest
import torch

from memlab import Recipe
from memlab.book import beside

GPT2 = Recipe("gpt2", batch_size=4, seq_len=1024)


def test_without_a_card_the_twin_is_measured_and_records_stand_beside():
    shown = beside(GPT2, "T4")
    rows = shown.data
    assert list(rows.index[:2]) == ["full size, T4", "tiny twin, this CPU"]
    assert rows["error"].isna().tolist()[0] and abs(rows["error"].iloc[1]) < 0.001
    (recorded,) = [row for row in rows.index if "H100" in row]
    assert recorded.startswith("recorded") and abs(rows.loc[recorded, "error"]) < 0.02
    assert "No GPU here" in shown.caption


@pytest.mark.parametrize(
    "batch, minutes, said", [(4096, 9, "has no room for it"), (4, 1e-6, "take longer than")]
)
def test_on_a_card_without_room_or_time_it_says_so(monkeypatch, batch, minutes, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    module = sys.modules["memlab.book.beside"]
    found, why_not = module._full_size_here(GPT2.but(batch_size=batch), minutes)
    assert found is None and said in why_not


def test_what_cannot_be_trained_says_why_in_the_place_of_rows():
    shown = beside(GPT2.but(precision="bf16"), "T4")
    assert shown.data.empty and "T4 has no native bfloat16" in shown.caption
