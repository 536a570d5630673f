"""What the source documents state, and the verdicts that the chapters' cells reach."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """One statement of a source, decided, or a subject that it only names.

    word: one of `WORDS`, or `NAMED`.
    """

    id: str
    says: str
    source: str
    word: str
    because: str

    def __str__(self) -> str:
        return f"{self.id} ({self.source}): “{self.says}”\n{self.word}: {self.because}"

    def _repr_markdown_(self) -> tuple[str, dict[str, dict[str, str]]]:
        """What a notebook shows, and beside it the verdict as data, for the book's ledger."""
        text = (
            f"**{self.id}** “{self.says}” *({self.source})*\n\n"
            f"**{self.word[0].upper()}{self.word[1:]}**: {self.because}"
        )
        return text, {"verdict": {"id": self.id, "word": self.word, "because": self.because}}


WORDS = ("holds", "holds with a condition", "does not hold", "open")
NAMED = "named, not claimed"


def verdict(id: str, holds: bool | None, because: str, condition: bool = False) -> Verdict:
    """Decide a statement by the rule of the claims page: `because` has the figures behind it.

    holds: what a cell computed; None where that does not decide the statement.
    condition: the statement is true in some cases only, or was checked in part only, and `because`
    names which.

    Raises ValueError for an unknown id.
    """
    known = all_claims()
    if id not in known:
        raise ValueError(f"no claim has the id {id!r}: allowed are {', '.join(known)}")
    if holds is None:
        word = WORDS[3]
    else:
        word = WORDS[bool(condition)] if holds else WORDS[2]
    return Verdict(id, known[id]["says"], known[id]["source"], word, because)


def named(id: str, because: str) -> Verdict:
    """What the book shows of a subject that a source names and says nothing of: no verdict.

    because: what is shown, and the figures of it. Raises ValueError for an unknown id.
    """
    known = all_named()
    if id not in known:
        raise ValueError(f"nothing is named by the id {id!r}: allowed are {', '.join(known)}")
    return Verdict(id, known[id]["says"], known[id]["source"], NAMED, because)


@cache
def _data() -> dict[str, Any]:
    text = resources.files("memlab.data").joinpath("claims.json").read_text(encoding="utf8")
    return json.loads(text)


def sources() -> dict[str, dict[str, str]]:
    """letter -> {"title", "form"} of every source; its statements' ids begin with the letter."""
    return _data()["sources"]


@cache
def all_claims() -> dict[str, dict[str, Any]]:
    """id -> {"says", "topic", "source", "word"} of every statement, in the order of the sources.

    word: the verdict that the book is expected to reach; its build fails at another one (the
    extension `ledger`), a reader's notebook does not. "clock" or "gpu_clock", where it stands:
    which measured time decides, everywhere or where there is a GPU, so that another machine may
    reach another verdict.
    """
    return {
        claim["id"]: claim | {"source": sources()[claim["id"][0]]["title"]}
        for claim in _data()["claims"]
    }


@cache
def all_named() -> dict[str, dict[str, str]]:
    """id -> {"says", "source"} of every subject that a source only names."""
    return {
        one["id"]: one | {"source": sources()[one["source"]]["title"]} for one in _data()["named"]
    }
