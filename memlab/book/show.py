"""Tables, bar charts and timelines in the book's style, legible on white and on black."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from memlab.book.colours import COLOURS, GREY
from memlab.card.step_time import ANCHORED
from memlab.footprint import Category, Footprint
from memlab.gpus import find_gpu
from memlab.units import MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType
    from pandas.io.formats.style import Styler

    from memlab.predict.measure import Measurement

STYLE: dict[RcKeyType, Any] = {
    "axes.facecolor": "none",
    "savefig.transparent": True,
    "figure.dpi": 110,
    "font.size": 10,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
}


def figure(width: float = 7.0, height: float = 3.2, **subplots: Any) -> tuple[Figure, Any]:
    """`plt.subplots` in the book's style; returns (figure, axes)."""
    mpl.rcParams.update(STYLE)
    # `frameon=False` draws no background at all. From a background of the colour "none" IPython
    # concludes that the ink needs a light or a dark one, and JupyterLab adds it.
    look: dict[str, Any] = {"figsize": (width, height), "layout": "constrained", "frameon": False}
    return plt.subplots(**look, **subplots)


def error(predicted: Any, measured: Any) -> Any:
    """predicted / measured - 1: negative if the prediction falls short."""
    return predicted / measured - 1


def between(low: float, high: float) -> str:
    """A range as "0.39–0.57", with decimals that suit its size; one number if both ends agree."""
    digits = next(d for d, end in enumerate((10, 1, 0.1, 0.01, 0)) if abs(high) >= end)
    return "–".join(dict.fromkeys(f"{end:,.{digits}f}" for end in (low, high)))


def ratio_between(ratio: float) -> str:
    """The range of the ratio between two estimated steps of one model on one GPU, as text."""
    return between(ratio / ANCHORED, ratio * ANCHORED)


def compare(rows: Mapping[str, Footprint | Measurement]) -> pd.DataFrame:
    """Compare runs in a table with one row per run.

    rows: label -> result of `simulate` or `measure`.

    Returns a DataFrame. Sizes are numbers in MiB (2**20 bytes), times are in milliseconds.
    """
    table = {}
    for label, run in rows.items():
        footprint = _footprint(run)
        row: dict[str, float | str] = {"peak": footprint.peak_allocated / MiB}
        if footprint.peak_reserved is not None:
            row["reserved"] = footprint.peak_reserved / MiB
        for name in list(Category)[:5]:
            row[name.replace("_", " ")] = footprint.breakdown.get(name, 0) / MiB
        row["peak in"] = footprint.peak_phase
        if footprint.step_time:
            row["ms a step, estimated"] = footprint.step_time.expected * 1e3
        if not isinstance(run, Footprint):
            row["ms a step"] = run.step_seconds["median"] * 1e3
            row["samples/s"] = run.samples_per_second
        table[label] = row
    return pd.DataFrame.from_dict(table, orient="index")


def _footprint(run: Footprint | Measurement) -> Footprint:
    return run if isinstance(run, Footprint) else run.footprint


def table(frame: pd.DataFrame, caption: str = "") -> Styler:
    """A DataFrame as a table of the book, with thousands separators and one decimal.

    Columns whose name begins with "error" are in per cent. Columns whose name begins with
    "s a step" are seconds with two decimals.
    """
    kinds = {"error": signed, "s a step": "{:,.2f}"}
    formats = {}
    for column in frame.columns:
        if frame[column].dtype.kind == "f":
            styles = (style for name, style in kinds.items() if str(column).startswith(name))
            formats[column] = next(styles, "{:,.1f}")
        elif frame[column].dtype.kind == "i":
            formats[column] = "{:,}"
    styled = frame.style.format(formats, na_rep="—")
    return styled.set_caption(caption) if caption else styled


def signed(share: float) -> str:
    """An error in per cent with its sign; no sign if it rounds to 0.00%."""
    text = f"{share:+.2%}"
    return text[1:] if text[1:] == "0.00%" else text


def bars(rows: Mapping[str, Footprint | Measurement], limit: str | int | None = None) -> Figure:
    """Stacked horizontal bars of the peaks by category, one bar per run, in GiB.

    rows: label -> result of `simulate` or `measure`. The estimated seconds of a step, if there is
        an estimate, are printed next to the bar.
    limit: a GPU's name or a number of bytes; a line is drawn where its usable memory ends.
    """
    footprints = {name: _footprint(run) for name, run in rows.items()}
    fig, ax = figure(height=0.9 + 0.42 * len(rows))
    left = np.zeros(len(rows))
    for name in Category:
        values = np.array([f.breakdown.get(name, 0) for f in footprints.values()]) / 2**30
        # A category that is too thin to see in every bar gets no entry in the legend either.
        if values.max() > 0.002 * max(left.max(), 1e-9) and values.max() > 0:
            label = name.replace("_", " ")
            ax.barh(list(footprints), values, left=left, color=COLOURS[name], label=label)
            left += values
    times = {y: f.step_time for y, f in enumerate(footprints.values()) if f.step_time}
    for y, time in times.items():
        yaxis_transform = ax.get_yaxis_transform()
        seconds = f"{between(time.low, time.high)} s"
        ax.text(1.01, y, seconds, va="center", transform=yaxis_transform)
    if times:
        ax.text(1.01, 1, "a step,\nestimated", va="bottom", transform=ax.transAxes)
    card = find_gpu(limit) if limit else None
    ends = ((card and card.usable) or 0) / 2**30
    right = max(left.max(), ends)
    for y, footprint in enumerate(footprints.values()):
        total = sum(footprint.breakdown.values()) / 2**30  # including categories that are not drawn
        # The label goes behind the GPU's line if the line would run through it.
        struck = total < ends < total + 0.14 * right
        ax.text(ends if struck else total, y, f" {total:,.1f}", va="center")
    if card:
        ax.axvline(ends, color=GREY, linestyle="--")
        at = (ends, 1), ("data", "axes fraction")
        ax.annotate(f"{card.name} ", at[0], ha="right", va="bottom", xycoords=at[1])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="GiB", xlim=(0, right * (1.2 if times else 1.12)))
    fig.legend(loc="outside lower center", ncols=5)
    return fig


def timeline(footprint: Footprint) -> Figure:
    """Memory over one step by category, with the phases marked; the x axis counts events."""
    line = footprint.timeline
    assert line is not None, "of a step that was traced"
    fig, ax = figure(height=3.6)
    shown = [name for name in Category if max(line.levels[name]) > 0.004 * footprint.peak_allocated]
    stack = [np.array(line.levels[name]) / 2**30 for name in shown]
    ax.stackplot(
        range(len(line.phases)),
        *stack,
        labels=[name.replace("_", " ") for name in shown],
        colors=[COLOURS[name] for name in shown],
    )
    for phase, start, end in line.spans():
        ax.axvline(end, color=GREY, linewidth=0.6)
        if end - start > 0.016 * len(phase) * len(line.phases):  # the label has room
            ax.annotate(
                phase, ((start + end) / 2, 1.01), xycoords=("data", "axes fraction"), ha="center"
            )
    ax.set(
        xlabel="events: a tensor is allocated or freed", ylabel="GiB", xlim=(0, len(line.phases))
    )
    fig.legend(loc="outside lower center", ncols=4)
    return fig
