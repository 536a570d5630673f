"""The sources' statements and their verdicts."""

import json
from html import escape

import pytest
from contents import ROOT

from memlab.book.claims import CLAIMS, SUBJECTS, Verdict, verdict, verdicts

CHAPTERS = ROOT / "chapters"


@pytest.mark.parametrize(
    ("holds", "condition", "said"),
    [
        (True, False, "✓ holds"),
        (True, True, "◐ holds with a condition"),
        (False, True, "✗ does not hold"),
        (None, True, "○ open"),
    ],
)
def test_the_word_follows_from_what_was_computed_and_is_read_again(holds, condition, said):
    assert verdict("B3", holds, condition) == said
    figure = f"<span data-figure=\"verdict('B3', a &lt; b)\">{said}</span>"
    says, source, because = "1 < 2", "a guide", 'At 1 &lt; <span data-figure="b">2</span>\n`x`.'
    text = (
        f'<details id="claim-b3">\n<summary><b>B3</b> “{escape(says)}” ({source}): <b>{figure}</b>'
        f"</summary>\n\n{because}\n\n</details>"
    )
    wanted = Verdict("B3", says, source, said[2:], "At 1 &lt; 2 `x`.")
    assert verdicts(f"Before.\n\n{text}\n\nAfter.\n{text}") == [wanted, wanted]


def test_an_unknown_statement_is_refused():
    with pytest.raises(ValueError, match="'Z1': allowed are A1"):
        verdict("Z1", True)


def test_every_statement_has_one_verdict_which_is_a_figure_of_the_text():
    found = []
    for file in sorted(CHAPTERS.glob("*.ipynb")):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            for one in verdicts(text) if cell["cell_type"] == "markdown" else ():
                is_figure = f"data-figure=\"verdict('{one.id}', " in text
                assert is_figure == (one.id in CLAIMS), one.id
                found.append(one.id)
    assert sorted(found) == sorted([*CLAIMS, *SUBJECTS])
