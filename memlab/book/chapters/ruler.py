"""Numbers on a ruler of a few marks: bits, blocks with their own scale, and one outlier."""

import math
import random
from statistics import NormalDist

from memlab.book.panel import Panel

BITS = range(2, 9)
BLOCKS = (16, 32, 64, 128, 256)
OUTLIER = 100  # the place of the value that the slider changes
SCALE_BITS = 32  # one fp32 number a block

_draw = random.Random(12)
VALUES = [round(_draw.gauss(0, 1), 3) for _ in range(max(BLOCKS))]


def linear(bits: int) -> list[float]:
    """Marks at equal distances from -1 to 1, 0 among them; the lowest code is given up."""
    highest = 2 ** (bits - 1) - 1
    return [code / highest for code in range(-highest, highest + 1)]


def normal_float() -> list[float]:
    """The 16 marks of NF4: quantiles of the normal distribution, from -1 to 1.

    QLoRA, arXiv:2305.14314, with the ends that bitsandbytes takes.
    """
    end = ((1 - 1 / 32) + (1 - 1 / 30)) / 2
    quantile = NormalDist().inv_cdf
    upper = [quantile(end - (end - 0.5) * i / 8) for i in range(8)]
    lower = [-quantile(end - (end - 0.5) * i / 7) for i in range(7)]
    return sorted(mark / upper[0] for mark in [*lower, 0.0, *upper])


def rounded(values: list[float], marks: list[float], block: int) -> list[float]:
    """Each value at the nearest mark of its block, which is scaled to the block's largest."""
    back = []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        scale = max(map(abs, part))
        if not scale:
            back += part
            continue
        for value in part:
            # of two equally near marks the lower one
            back.append(min(marks, key=lambda mark: abs(mark - value / scale)) * scale)
    return back


def error(values: list[float], back: list[float]) -> float:
    """Root mean square error, relative to the values."""
    off = math.sqrt(sum((a - b) ** 2 for a, b in zip(values, back, strict=True)))
    return off / math.sqrt(sum(a**2 for a in values))


def figures(bits: int, block: int, outlier: float, levels: str) -> dict[str, float]:
    """What the panel says. levels: `linear` or `nf4`; outlier: 0 leaves the values as drawn.

    error: of all values; others: of all but the outlier; zeros: share of the others that became
    0; linear, nf4: `others` of either kind of marks, NF4 with its own 4 bits; weight: bits per
    value.
    """
    values = list(VALUES)
    if outlier:
        values[OUTLIER] = outlier
    found = {}
    for name, marks in (("linear", linear(bits)), ("nf4", normal_float())):
        back = rounded(values, marks, block)
        rest, rest_back = list(values), list(back)
        del rest[OUTLIER], rest_back[OUTLIER]
        found[name] = error(rest, rest_back)
        if name == levels:
            found["error"], found["others"] = error(values, back), found[name]
            found["zeros"] = sum(x == 0 for x in rest_back) / len(rest)
    found["weight"] = (4 if levels == "nf4" else bits) + SCALE_BITS / block
    return found


class QuantizationRuler(Panel):
    """256 normal numbers in 2 to 8 bits: where they go, the error, and the bits per weight.

    bits, block, outlier, levels: as the fields begin; levels is `linear` or `nf4`.

    Raises ValueError for what the fields do not allow.
    """

    kind = "ruler"
    still = "This panel needs scripts. It rounds numbers to the marks of a few bits."

    def __init__(self, bits: int = 4, block: int = 64, outlier: int = 0, levels: str = "linear"):
        allowed = {
            "bits": (bits, BITS),
            "block": (block, BLOCKS),
            "outlier": (outlier, range(61)),
            "levels": (levels, ("linear", "nf4")),
        }
        for name, (value, choices) in allowed.items():
            if value not in choices:
                said = ", ".join(map(str, choices)) if len(choices) < 10 else "0 to 60"
                raise ValueError(f"{name} is {value!r}: allowed are {said}")
        self.fields = {name: value for name, (value, _) in allowed.items()}

    def data(self) -> dict:
        return {
            "fields": self.fields,
            "blocks": list(BLOCKS),
            "values": VALUES,
            "outlier": OUTLIER,
            "scaleBits": SCALE_BITS,
            "nf4": normal_float(),
        }
