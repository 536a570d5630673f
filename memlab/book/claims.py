"""What the source documents state, and the verdicts that the chapters reach.

A chapter gives each its fold of Markdown, which a notebook shows without a run:

    <details id="claim-a5">
    <summary><b>A5</b> “what the source says” (the source): <b><span
    data-figure="verdict('A5', half)">✗ does not hold</span></b></summary>

    Why, with its figures.
    </details>

The verdict is a figure of the text like any other: `make book` compares it with the run
(`tools/figures.py`), and the claims page collects the folds (`_ext/ledger.py`).
"""

import json
import re
from dataclasses import dataclass
from html import unescape
from importlib import resources
from typing import Any

MARKS = {"holds": "✓", "holds with a condition": "◐", "does not hold": "✗", "open": "○"}
WORDS = tuple(MARKS)
NAMED = "named, not claimed"
FOLD = re.compile(
    r'<details id="claim-\w+">\s*<summary><b>(\w+)</b> “(.*?)” \((.*?)\): <b>(.*?)</b></summary>'
    r"(.*?)</details>",
    re.DOTALL,
)
SPAN = re.compile(r"</?span[^>]*>")

_DATA = json.loads(resources.files("memlab.data").joinpath("claims.json").read_text("utf8"))
# letter -> {"title", "form"} of every source; its statements' ids begin with the letter.
SOURCES: dict[str, dict[str, str]] = _DATA["sources"]
# id -> {"says", "topic", "source"} of every statement, in the order of the sources. "clock" or
# "gpu_clock", where it stands: which measured time decides, everywhere or where there is a GPU, so
# that another machine may reach another verdict.
CLAIMS: dict[str, dict[str, Any]] = {
    claim["id"]: claim | {"source": SOURCES[claim["id"][0]]["title"]} for claim in _DATA["claims"]
}
# id -> {"says", "source"} of every subject that a source only names.
SUBJECTS: dict[str, dict[str, str]] = {
    subject["id"]: subject | {"source": SOURCES[subject["source"]]["title"]}
    for subject in _DATA["named"]
}


@dataclass(frozen=True)
class Verdict:
    """What a text says of a statement of a source, or of a subject that it only names.

    word: one of `WORDS`, or `NAMED`. says, source: as the text cites them. because: Markdown.
    """

    id: str
    says: str
    source: str
    word: str
    because: str


def verdicts(text: str) -> list[Verdict]:
    """The verdicts of a piece of Markdown, in their order."""
    statements = []
    for id, says, source, word, because in FOLD.findall(text):
        word = SPAN.sub("", word).strip(" ".join(MARKS.values()))
        why = " ".join(SPAN.sub("", because).split())
        statements.append(Verdict(id, unescape(says), unescape(source), word, why))
    return statements


def verdict(id: str, holds: bool | None, condition: bool = False) -> str:
    """The mark and word of a statement by the rule of the claims page, such as `✓ holds`.

    holds: what a chapter computed; None where that does not decide the statement.
    condition: the statement is true in some cases only, or was checked in part only.

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
    """Whether seconds measured on this machine decide a statement: another may decide otherwise."""
    import torch

    claim = CLAIMS[id]
    return "clock" in claim or ("gpu_clock" in claim and torch.cuda.is_available())
