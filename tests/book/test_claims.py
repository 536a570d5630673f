"""The sources' statements and their verdicts."""

import pytest

from memlab.book.claims import all_claims, verdict


def test_every_statement_has_its_words_and_source():
    known = all_claims()
    assert len(known) == 76
    assert all(claim["says"] and claim["source"] for claim in known.values())


@pytest.mark.parametrize(
    ("holds", "condition", "word"),
    [
        (True, False, "holds"),
        (True, True, "holds with a condition"),
        (False, False, "does not hold"),
        (False, True, "does not hold"),
    ],
)
def test_the_word_follows_from_what_was_computed(holds, condition, word):
    assert verdict("B3", holds, "measured", condition).word == word


def test_an_unknown_statement_is_refused():
    with pytest.raises(ValueError, match="'Z1': allowed are A1"):
        verdict("Z1", True, "")
