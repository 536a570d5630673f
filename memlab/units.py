"""Bytes and seconds in print: MiB and GiB are powers of two; and numbers rounded up."""

import math
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

Number = TypeVar("Number", int, "np.ndarray")
MiB, GiB = 2**20, 2**30


def mib(nbytes: int | None) -> str:
    """Bytes as text in MiB, one decimal; an em dash for None."""
    return "—" if nbytes is None else f"{nbytes / MiB:,.1f} MiB"


def gib(nbytes: int) -> str:
    """Bytes as text in GiB, one decimal."""
    return f"{nbytes / GiB:,.1f} GiB"


def in_unit_of(nbytes: int, largest: int) -> str:
    """Bytes as text in the unit of the largest figure beside them: GiB from 1 GiB on, else MiB."""
    return mib(nbytes) if largest < GiB else f"{nbytes / GiB:,.2f} GiB"


def seconds_text(value: float) -> str:
    """Seconds as text with three figures that count."""
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.{max(0, 2 - int(math.log10(value)))}f} s"


def round_up(nbytes: Number, unit: int) -> Number:
    """The next multiple of a unit, of a number or of an array of them."""
    return -(-nbytes // unit) * unit
