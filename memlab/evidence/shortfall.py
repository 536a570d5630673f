"""How often a training that is told to fit does not: published peaks over their predictions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from memlab.evidence.loops import kept_predictions
from memlab.evidence.records import load, published_files

# What is compared, the first that a run has: (published figure, figure of a kept prediction). What
# the whole device uses has the run's own context in it.
COMPARED = (
    ("peak_reserved_bytes", "peak_reserved_bytes"),
    ("device_used_bytes", "peak_reserved_bytes"),
    ("peak_active_bytes", "peak_allocated_bytes"),
    ("peak_allocated_bytes", "peak_allocated_bytes"),
)


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

    Of all runs that the package has with bytes and with a prediction, those of 2022 among them.
    """
    found, kept = [], kept_predictions()["runs"]
    for file, path in published_files().items():
        for run in load(path):
            said = kept[file][run.name]
            for real, predicted in COMPARED:
                if real in run.figures and predicted in said:
                    beside = run.figures["context_bytes"] if real == "device_used_bytes" else 0
                    found.append(run.figures[real] / (said[predicted] + beside))
                    break
    return tuple(sorted(found))


def shortfall(needed: int, total: int) -> Shortfall:
    """How many published runs took so much more than predicted that `total` bytes are too few.

    needed: predicted bytes of the card, context included, as in `memlab.fits`.
    """
    known = excesses()
    return Shortfall(sum(excess * needed > total for excess in known), len(known))
