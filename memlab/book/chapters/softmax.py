"""The softmax of a row that comes in tiles: maximum, sum, factor and output, step by step."""

import math
import random
from typing import NamedTuple

from memlab.panels.panel import Panel

LOWEST = -(2 - 2**-23) * 2.0**127  # of fp32: the floor of the running maximum
MOST = 24  # scores in a row

_draw = random.Random(5)
VALUES = [round(_draw.gauss(0, 1), 2) for _ in range(MOST)]
_usual = [round(_draw.gauss(0, 2), 1) for _ in range(12)]
ROWS = {
    "usual": _usual,
    "rising": [round(0.8 * i - 4, 1) for i in range(12)],
    "falling": [round(4.8 - 0.8 * i, 1) for i in range(12)],
    "all near 10,000": [10_000 + x for x in _usual],
    "a giant at the end": [*_usual[:11], 50],
    "first half hidden": [-math.inf] * 6 + _usual[6:],
}


class Step(NamedTuple):
    """After a tile: the maximum, exp(old maximum - new one), the sum, and the unfinished output."""

    m: float
    factor: float
    total: float
    output: float


def running(scores: list[float], values: list[float], tile: int) -> list[Step]:
    """The steps of a row, `tile` scores at a time; `output / total` of the last one is the result.

    The maximum has a floor, so that a tile of nothing but -inf does no harm.
    """
    m, total, output, steps = -math.inf, 0.0, 0.0, []
    for start in range(0, len(scores), tile):
        part = scores[start : start + tile]
        new = max(m, LOWEST, *part)
        factor = math.exp(m - new)
        weights = [math.exp(x - new) for x in part]
        total = total * factor + sum(weights)
        products = (w * v for w, v in zip(weights, values[start : start + tile], strict=True))
        output, m = output * factor + sum(products), new
        steps.append(Step(m, factor, total, output))
    return steps


def whole(scores: list[float], values: list[float]) -> float:
    """The softmax's output with the whole row at hand: nan for a row of nothing but -inf."""
    most = max(scores)
    if most == -math.inf:
        return math.nan
    weights = [math.exp(x - most) for x in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


class RunningSoftmax(Panel):
    """One row of attention, tile by tile: m, l, the factor that corrects them, and the output.

    rows: name -> scores, up to 24 a row; -inf hides one. A reader can type others.

    Raises ValueError without rows, and for scores that are no numbers below infinity.
    """

    kind = "softmax"
    still = "This panel needs scripts. It takes the softmax of a row of scores tile by tile."

    def __init__(self, rows: dict[str, list[float]] = ROWS):
        if not rows:
            raise ValueError("rows is empty: allowed are one or more named rows of scores")
        for name, scores in rows.items():
            wrong = [x for x in scores if not isinstance(x, int | float) or not x < math.inf]
            if wrong or not 1 <= len(scores) <= MOST:
                given = f"holds {wrong[0]!r}" if wrong else f"has {len(scores)} scores"
                raise ValueError(
                    f"rows[{name!r}] {given}: allowed are 1 to {MOST} numbers below infinity"
                )
        self.rows = {name: list(scores) for name, scores in rows.items()}

    def data(self) -> dict:
        said = {  # JSON has no infinity
            name: ["-inf" if x == -math.inf else x for x in scores]
            for name, scores in self.rows.items()
        }
        return {"rows": said, "values": VALUES, "most": MOST}
