"""Multi-tensor steps, whole steps and embeddings in 8 bits."""

import pandas as pd
import pytest

from memlab import Recipe
from memlab.book.chapters import optimizers_deeper as deeper

FORMS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def test_multi_tensor_steps_need_few_calls(monkeypatch):
    monkeypatch.setattr(deeper, "SMALL", [(64,)] * 30)
    monkeypatch.setattr(deeper, "LARGE", [(64,)])
    steps = deeper.steps_in_forms(FORMS)
    calls, on_t4 = steps["calls"], steps["T4: ms, estimated"]
    assert calls["fused"] <= calls["foreach"] <= 20 and calls["loop"] >= 30
    assert on_t4["fused"] < on_t4["foreach"] < on_t4["loop"]
    assert "control" in deeper.forms_table(steps).to_html()


@pytest.mark.parametrize(
    "small, calls, word", [(0.3, 20, True), (0.99, 20, None), (0.3, 900, False)]
)
def test_b29_is_decided_by_calls_and_a_clock(small, calls, word):
    """Where this machine's clock shows nothing, an estimate decides nothing."""
    times = {"loop": 1, "foreach": small, "fused": small, "control": 1.02}
    steps = pd.DataFrame(
        {"calls": {"loop": 1600, "foreach": calls, "fused": 4}, "time, 400 x 64": times}
    )
    assert deeper.quicker_through_small(steps) is word


def test_foreach_borrows_four_bytes_a_weight():
    assert deeper.step_on_t4([(1000, 100)] * 2, foreach=True).breakdown["temporary"] == 4 * 200_000
    assert deeper.step_on_t4([(1000, 100)] * 2, fused=True).breakdown["temporary"] == 0


def test_the_optimizers_share_of_a_whole_step():
    tiny = Recipe("bert-large-tiny", batch_size=1, seq_len=16)
    share = deeper.whole_steps(tiny, ["sgd", "adamw_torch"])["optimizer, %"]
    assert 0 < share["sgd"] < share["adamw_torch"] < 100


def test_rows_of_an_embedding_are_further_apart_and_8_bits_put_the_step_off_a_little():
    frame = deeper.rows_of_moments()
    assert frame["spread"]["embedding"] > 2 * frame["spread"]["linear"]
    assert frame["off, %"].between(0, 5).all()
