"""How often a training that is predicted to fit does not, by published peaks over predictions."""

import csv
import functools
from dataclasses import dataclass

from memlab.evidence.records import FOLDER

# Written by validation/accuracy.py, with a row for each figure of each run.
ACCURACY = FOLDER.parent / "accuracy.csv"
# A run is compared by the first of these that it has: the nearest to what the GPU must provide.
FIGURES = ("reserved", "device used", "active", "allocated")


@dataclass(frozen=True)
class Shortfall:
    """Of `runs` published runs, `short` took so much more than predicted that they do not fit."""

    short: int
    runs: int

    @property
    def chance(self) -> float:
        """The share of runs that fall short."""
        return self.short / self.runs

    def __str__(self) -> str:
        share = f"{self.chance:.0%}" if self.short else f"below {1 / self.runs:.0%}"
        return f"{share} ({self.short} of {self.runs} published runs)"


@functools.cache
def excesses() -> tuple[float, ...]:
    """Recorded over predicted bytes of each published run, in rising order.

    All runs with bytes and a prediction count, including those of 2022, whose software took more
    than today's.
    """
    runs: dict[tuple[str, str], dict[str, float]] = {}  # (file, run) -> figure -> ratio
    with ACCURACY.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["file"].startswith("published-") and row["predicted"]:
                excess = float(row["recorded"]) / float(row["predicted"])
                runs.setdefault((row["file"], row["run"]), {})[row["figure"]] = excess
    nearest = ([run[name] for name in FIGURES if name in run] for run in runs.values())
    return tuple(sorted(ratios[0] for ratios in nearest if ratios))


def shortfall(needed: int, total: int) -> Shortfall:
    """How many published runs exceed their prediction by so much that `total` bytes are too few.

    needed: predicted bytes of GPU memory, context included, as in `memlab.fits`. A run counts if
    `needed`, times its recorded over predicted bytes, is more than `total`.
    """
    ratios = excesses()
    return Shortfall(sum(excess * needed > total for excess in ratios), len(ratios))
