"""Bytes and seconds as text, and rounding up. MiB and GiB are powers of two."""

import math
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

Number = TypeVar("Number", int, "np.ndarray")
MiB, GiB = 2**20, 2**30


def mib(nbytes: int | None) -> str:
    """Bytes as text in MiB with one decimal; an em dash for None."""
    return "—" if nbytes is None else f"{nbytes / MiB:,.1f} MiB"


def gib(nbytes: int) -> str:
    """Bytes as text in GiB with one decimal."""
    return f"{nbytes / GiB:,.1f} GiB"


def in_unit_of(nbytes: int, largest: int) -> str:
    """Bytes as text in the unit that suits `largest`: GiB from 1 GiB on, else MiB.

    largest: the largest number of the same table, so that all rows have one unit.
    """
    return mib(nbytes) if largest < GiB else f"{nbytes / GiB:,.2f} GiB"


def seconds_text(value: float) -> str:
    """Seconds as text with three significant figures; below one second in ms."""
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.{max(0, 2 - int(math.log10(value)))}f} s"


def round_up(nbytes: Number, unit: int) -> Number:
    """The next multiple of `unit`, for a number or element-wise for an array."""
    return -(-nbytes // unit) * unit
