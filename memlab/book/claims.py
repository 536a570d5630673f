"""The statements of the source documents, and the verdicts that the chapters reach on them.

A chapter gives each statement a fold in Markdown, which a notebook shows without being run:

    <details id="claim-a5">
    <summary><b>A5</b> “what the source says” (the source): <b><span
    data-figure="verdict('A5', half)">✗ does not hold</span></b></summary>

    Why, with its figures.
    </details>

The verdict is a figure in the text. `make book` compares it with the value that the run computes
(`tools/figures.py`), and the claims page collects all folds (`_ext/ledger.py`).
"""

import json
import re
from dataclasses import dataclass
from html import unescape
from importlib import resources
from typing import Any

MARKS = {"holds": "✓", "holds with a condition": "◐", "does not hold": "✗", "open": "○"}
WORDS = tuple(MARKS)
NAMED = "named, not claimed"  # a source names the subject but states nothing about it
FOLD = re.compile(
    r'<details id="claim-\w+">\s*<summary><b>(\w+)</b> “(.*?)” \((.*?)\): <b>(.*?)</b></summary>'
    r"(.*?)</details>",
    re.DOTALL,
)
SPAN = re.compile(r"</?span[^>]*>")

_DATA = json.loads(resources.files("memlab.data").joinpath("claims.json").read_text("utf8"))
# letter -> {"title", "form"} of each source; the ids of its statements begin with the letter.
SOURCES: dict[str, dict[str, str]] = _DATA["sources"]
# id -> {"says", "topic", "source"} of each statement, in the order of the sources. A key "clock"
# says which measured time decides the statement, so that another machine may reach another verdict.
# A key "gpu_clock" does so for a time that is measured only on a machine with a GPU.
CLAIMS: dict[str, dict[str, Any]] = {
    claim["id"]: claim | {"source": SOURCES[claim["id"][0]]["title"]} for claim in _DATA["claims"]
}
# id -> {"says", "source"} of each subject that a source names without a statement about it.
SUBJECTS: dict[str, dict[str, str]] = {
    subject["id"]: subject | {"source": SOURCES[subject["source"]]["title"]}
    for subject in _DATA["named"]
}


@dataclass(frozen=True)
class Verdict:
    """The verdict of one fold, on a statement of a source or on a subject that it only names.

    says, source: the statement and its source, as the fold cites them.
    word: one of `WORDS`, or `NAMED`.
    because: the reasons, in Markdown.
    """

    id: str
    says: str
    source: str
    word: str
    because: str


def verdicts(text: str) -> list[Verdict]:
    """The verdicts of all folds in a piece of Markdown, in order."""
    statements = []
    for id, says, source, word, because in FOLD.findall(text):
        word = SPAN.sub("", word).strip(" ".join(MARKS.values()))
        why = " ".join(SPAN.sub("", because).split())
        statements.append(Verdict(id, unescape(says), unescape(source), word, why))
    return statements


def verdict(id: str, holds: bool | None, condition: bool = False) -> str:
    """The mark and word of a verdict, such as `✓ holds`.

    id: the id of the statement.
    holds: the result that a chapter computed; None leaves the statement open.
    condition: whether the statement is true only in some cases, or was checked only in part.

    Raises ValueError for an unknown id.
    """
    if id not in CLAIMS:
        raise ValueError(f"no claim has the id {id!r}: allowed are {', '.join(CLAIMS)}")
    if holds is None:
        word = WORDS[3]
    else:
        word = WORDS[bool(condition)] if holds else WORDS[2]
    return f"{MARKS[word]} {word}"


def rests_on_a_clock(id: str) -> bool:
    """Whether times measured on this machine decide a statement, so that verdicts may differ."""
    import torch

    claim = CLAIMS[id]
    return "clock" in claim or ("gpu_clock" in claim and torch.cuda.is_available())
