"""The sources' statements and their verdicts."""

import json
from html import escape
from pathlib import Path

import pytest

from memlab.book.claims import NAMED, WORDS, all_claims, all_named, verdict, verdicts

CHAPTERS = Path(__file__).parents[2] / "chapters"


def test_every_statement_has_its_words_and_source():
    known = all_claims()
    assert len(known) == 75
    assert all(claim["says"] and claim["source"] for claim in known.values())
    clocks = [claim[key] for claim in known.values() for key in claim if "clock" in key]
    assert len(clocks) == 6 and all(len(why) > 20 for why in clocks)


@pytest.mark.parametrize(
    ("holds", "condition", "said"),
    [
        (True, False, "✓ holds"),
        (True, True, "◐ holds with a condition"),
        (False, False, "✗ does not hold"),
        (False, True, "✗ does not hold"),
        (None, False, "○ open"),
        (None, True, "○ open"),
    ],
)
def test_the_word_follows_from_what_was_computed(holds, condition, said):
    assert verdict("B3", holds, condition) == said
    figure = f"<span data-figure=\"verdict('B3', a &lt; b)\">{said}</span>"
    why = 'At 1 &lt; <span data-figure="b">2</span>\n`x`.'
    says, source = (escape(all_claims()["B3"][key]) for key in ("says", "source"))
    text = (
        f'<details id="claim-b3">\n<summary><b>B3</b> “{says}” ({source}): <b>{figure}</b>'
        f"</summary>\n\n{why}\n\n</details>"
    )
    (found,) = verdicts(f"Before.\n\n{text}\n\nAfter.")
    assert (found.id, found.says) == ("B3", all_claims()["B3"]["says"])
    assert f"{found.source}: {found.word}" == f"{source}: {said[2:]}"
    assert found.because == "At 1 &lt; 2 `x`."
    assert verdicts(text + "\n" + text) == [found, found]


def test_what_is_only_named_is_no_statement():
    assert all_named().keys() == {"Ablation", "Pruning", "TensorRT", "LightSeq"}
    assert not all_named().keys() & all_claims().keys()


def test_an_unknown_statement_is_refused():
    with pytest.raises(ValueError, match="'Z1': allowed are A1"):
        verdict("Z1", True)


@pytest.fixture(scope="module")
def said():
    """id -> verdict of every fold of the chapters, and the cells that hold one."""
    found, cells = {}, []
    for file in sorted(CHAPTERS.glob("*.ipynb")):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            here = verdicts("".join(cell["source"])) if cell["cell_type"] == "markdown" else []
            found |= {one.id: one for one in here}
            cells += [("".join(cell["source"]), one) for one in here]
    return found, cells


def test_every_verdict_is_a_figure_of_the_text(said):
    found, cells = said
    assert {one.word for one in found.values()} == {*WORDS, NAMED}
    assert len(cells) == len(all_claims()) + len(all_named()) == len(found)
    for text, one in cells:
        held = f"data-figure=\"verdict('{one.id}', " in text
        assert held == (one.id in all_claims()), one.id
        assert f'<details id="claim-{one.id.lower()}">' in text, one.id


def test_what_nobody_measured_does_not_hold_without_a_condition(said):
    """Printed seconds that no clock has met again leave a condition, and what the clock of a GPU
    alone decides is open without one."""
    words = {id: one.word for id, one in said[0].items()}
    printed = {id: words[id] for id, one in all_claims().items() if "samples/s" in one["says"]}
    assert len(printed) == 9 and set(printed.values()) == {"holds with a condition"}
    timed = {id: words[id] for id, one in all_claims().items() if "gpu_clock" in one}
    assert timed == {"B10": "open", "D3": "open"}
