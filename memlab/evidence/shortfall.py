"""How often a training that is predicted to fit does not: published peaks over predictions."""

import csv
import functools
from dataclasses import dataclass

from memlab.evidence.records import FOLDER

# The table of validation/accuracy.py: a row for each figure of each run.
ACCURACY = FOLDER.parent / "accuracy.csv"
# Of the figures of a run the first of these is compared: the nearest to what the card must have.
FIGURES = ("reserved", "device used", "active", "allocated")


@dataclass(frozen=True)
class Shortfall:
    """Of so many published `runs`, `short` took more than their prediction by a given share."""

    short: int
    runs: int

    @property
    def chance(self) -> float:
        """The share of the runs."""
        return self.short / self.runs

    def __str__(self) -> str:
        share = f"{self.chance:.0%}" if self.short else f"below {1 / self.runs:.0%}"
        return f"{share} ({self.short} of {self.runs} published runs)"


@functools.cache
def excesses() -> tuple[float, ...]:
    """Bytes of each published run over what is predicted of it, in rising order.

    Of all runs that have bytes and a prediction, those of 2022 among them.
    """
    runs: dict[tuple[str, str], dict[str, float]] = {}
    with ACCURACY.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["file"].startswith("published-") and row["predicted"]:
                excess = float(row["recorded"]) / float(row["predicted"])
                runs.setdefault((row["file"], row["run"]), {})[row["figure"]] = excess
    nearest = ([run[name] for name in FIGURES if name in run] for run in runs.values())
    return tuple(sorted(ratios[0] for ratios in nearest if ratios))


def shortfall(needed: int, total: int) -> Shortfall:
    """How many published runs took so much more than predicted that `total` bytes are too few.

    needed: predicted bytes of the card, context included, as in `memlab.fits`.
    """
    ratios = excesses()
    return Shortfall(sum(excess * needed > total for excess in ratios), len(ratios))
