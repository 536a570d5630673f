"""The sources' statements and their verdicts."""

import pytest

from memlab.book.claims import WORDS, all_claims, all_named, named, verdict


def test_every_statement_has_its_words_and_source():
    known = all_claims()
    assert len(known) == 75
    assert all(claim["says"] and claim["source"] for claim in known.values())
    assert {claim["word"] for claim in known.values()} == set(WORDS)
    clocks = [claim[key] for claim in known.values() for key in claim if "clock" in key]
    assert len(clocks) == 6 and all(len(why) > 20 for why in clocks)


@pytest.mark.parametrize(
    ("holds", "condition", "word"),
    [
        (True, False, "holds"),
        (True, True, "holds with a condition"),
        (False, False, "does not hold"),
        (False, True, "does not hold"),
        (None, False, "open"),
        (None, True, "open"),
    ],
)
def test_the_word_follows_from_what_was_computed(holds, condition, word):
    assert verdict("B3", holds, "measured", condition).word == word


def test_what_is_only_named_is_no_statement():
    assert all_named().keys() == {"Ablation", "Pruning", "TensorRT", "LightSeq"}
    shown = named("Pruning", "measured")
    assert shown.source == "Memory_Ablation" and shown.word == "named, not claimed"
    assert "**Named, not claimed**: measured" in shown._repr_markdown_()[0]
    assert shown.id not in all_claims()


def test_an_unknown_statement_is_refused():
    with pytest.raises(ValueError, match="'Z1': allowed are A1"):
        verdict("Z1", True, "")
    with pytest.raises(ValueError, match="'Z1': allowed are Ablation"):
        named("Z1", "")


def test_what_nobody_measured_is_not_expected_to_hold():
    """Printed seconds that no clock has met again leave a condition, and what the clock of a GPU
    alone decides is open without one."""
    printed = {id: one["word"] for id, one in all_claims().items() if "samples/s" in one["says"]}
    assert len(printed) == 9 and set(printed.values()) == {"holds with a condition"}
    timed = {id: one["word"] for id, one in all_claims().items() if "gpu_clock" in one}
    assert timed == {"B10": "open", "D3": "open"}
