"""Twelve public questions: what was tried, what `fits` says of it, and what happened."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from memlab.book import show
from memlab.gpus import find_gpu
from memlab.spec.recipe import Recipe

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

GiB = 2**30


class Try(NamedTuple):
    """A micro-batch that somebody tried, and the kept answer of `fits`.

    fitted: what happened. answer: with `fits`, `needed_bytes`, `peak_allocated_bytes` and
    `total_memory_bytes`.
    """

    question: dict[str, Any]
    size: int
    fitted: bool
    answer: dict[str, Any]

    @property
    def recipe(self) -> Recipe:
        """What was tried, with what had to be assumed."""
        return Recipe(batch_size=self.size, **self.question["recipe"])

    @property
    def right(self) -> bool:
        """Whether the answer is what happened."""
        return bool(self.answer["fits"] == self.fitted)

    @property
    def held(self) -> float:
        """GiB of tensors at the simulated peak."""
        return float(self.answer["peak_allocated_bytes"] / GiB)

    @property
    def needed(self) -> float:
        """GiB that the simulation asks of the card."""
        return float(self.answer["needed_bytes"] / GiB)

    @property
    def usable(self) -> float:
        """GiB of the card that PyTorch may have."""
        return (find_gpu(self.question["gpu"]).usable or 0) / GiB


def _kept_in(name: str) -> Any:
    return json.loads(resources.files("memlab.data").joinpath(name).read_text())


def tries() -> list[Try]:
    """Every try of every question, by size."""
    answers = _kept_in("answers.json")["answers"]
    return [
        Try(q, size, size in q["fitted"], answers[q["url"]][str(size)])
        for q in _kept_in("questions.json")["questions"]
        for size in sorted(q["fitted"] + q["failed"])
    ]


def kept_since() -> str:
    """The date of the kept answers."""
    return str(_kept_in("answers.json")["date"])


def table(found: list[Try]) -> Styler:
    """The tries with what `fits` says, and what happened."""
    rows = []
    for one in found:
        *_, project, _, number = one.question["url"].split("/")
        name = project if len(project) < 20 else f"{project[:17]}..."
        rows.append(
            {
                "thread": f'<a href="{one.question["url"]}">{name} {number}</a>',
                "tried": f"{one.size} x {one.recipe.seq_len:,}",
                "memlab": "fits" if one.answer["fits"] else "does not",
                "happened": "fitted" if one.fitted else "did not",
                "right": "yes" if one.right else "no",
                "GiB": one.needed,
                "card": one.answer["total_memory_bytes"] / GiB,
            }
        )
    styled = show.table(pd.DataFrame(rows), "Simulated for the card, and what happened")
    return styled.hide(axis="index")


def old_misses(found: list[Try]) -> pd.DataFrame:
    """Wrong answers of before 2022, GiB: GPT-2 on releases that kept more copies of the matrix
    of attention in each of its 12 layers with 12 heads."""
    rows = {}
    for one in found:
        if one.question["date"] < "2022" and not one.right:
            matrix = one.size * 12 * one.recipe.seq_len**2 * 4 * 12 / GiB
            rows[one.question["url"].rsplit("/", 1)[1]] = {
                "simulated, GiB": one.needed,
                "with 20 %": 1.2 * one.needed,
                "one more copy": one.needed + matrix,
                "two more": one.needed + 2 * matrix,
                "card": one.answer["total_memory_bytes"] / GiB,
            }
    return pd.DataFrame(rows).T
