"""The tables of what was recorded on a card beside what is predicted, for the page on accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from memlab.book import show
from memlab.evidence.accuracy import compare_kept, technique
from memlab.evidence.recording import file_of
from memlab.evidence.records import card_files, load
from memlab.spec.recipe import AUTOCAST, Recipe
from memlab.units import MiB

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler


def runs_of(device: str) -> pd.DataFrame:
    """One row per run that memlab recorded on a card: bytes, seconds and the kept predictions.

    device: the card's name, as its driver says it. allocated, reserved (MiB) and s a step as
    recorded, each with the prediction's error; context (MiB); inside: whether the seconds lie in
    the range that is told; kind: what is trained, in which format. seen: in the first session on
    the card, or later; listed: whether every allocation of it was listed, too.
    """
    rows: dict[str, dict[str, Any]] = {}
    file = file_of(device).name
    for run in load(card_files()[file]):
        rows[run.name] = {
            "context": run.figures["context_bytes"] / MiB,
            "kind": _kind(Recipe(**run.recipe)),
            "seen": "later" if "second session" in run.source else "first",
            "listed": "every allocation" in run.source,
        }
    for one in compare_kept(file):
        row = rows[one.name]
        if one.figure in ("allocated", "reserved"):
            row |= {one.figure: one.recorded / MiB, f"error of {one.figure}": one.error}
        elif one.figure == "seconds":
            row |= {"s a step": one.recorded, "error of seconds": one.error, "inside": one.inside}
    return pd.DataFrame.from_dict(rows, orient="index")


def parts(runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series, pd.DataFrame]:
    """Of `runs_of`: runs in which no rule was looked for, contexts (MiB) of those without paged
    states, and models of 7 and 8 billion weights, which keep a card busy."""
    blind = runs[(runs["seen"] != "first") & ~runs["listed"]]
    usual = runs["context"][~runs.index.str.contains("paged")]
    return blind, usual, runs[runs.index.str.contains("-7b|-8b")]


class Gain(NamedTuple):
    """How many times as fast one run is as another, recorded and estimated."""

    recorded: float
    estimated: float


def gain_of_fp16(device: str) -> Gain:
    """Of the guide's two runs of BERT-large that differ in the format alone."""
    runs = runs_of(device).loc[["published: vanilla", "published: fp16"]]
    (slow, fast), (of_slow, of_fast) = runs["s a step"], 1 + runs["error of seconds"]
    return Gain(slow / fast, slow / fast * of_slow / of_fast)


def _kind(recipe: Recipe) -> str:
    precision = "autocast" if recipe.precision in AUTOCAST else recipe.precision
    return f"{technique(recipe)}, {precision}"


def by_kind(runs: pd.DataFrame, device: str) -> Styler:
    """How many runs there are of each kind, and from where to where their errors go."""
    kinds = runs.groupby("kind")
    table = pd.DataFrame({"runs": kinds.size()})
    for figure, digits in (("allocated", 2), ("reserved", 2), ("seconds", 0)):
        table[figure] = [
            f"{show.signed(least, digits)} to {show.signed(most, digits)}"
            for least, most in kinds[f"error of {figure}"].agg(["min", "max"]).to_numpy()
        ]
    table = table.sort_values("runs", ascending=False)
    return show.table(table, f"{device}: errors of what is said, lowest to highest")


def every_run(runs: pd.DataFrame, device: str) -> Styler:
    """The recorded runs of a card, without what is said in a sentence."""
    columns = {
        "allocated": "allocated",
        "error of allocated": "error",
        "reserved": "reserved",
        "error of reserved": "error of it",
        "s a step": "s a step",
        "error of seconds": "error of s",
    }
    shown = runs[list(columns)].rename(columns=columns)
    table = show.table(shown, f"{device}: MiB and seconds recorded; errors of what is said")
    wrapped = "white-space: normal; overflow-wrap: break-word; max-width: min(19em, 38vw)"
    styles = [{"selector": "th.row_heading", "props": wrapped}]
    return table.set_table_styles(styles)
