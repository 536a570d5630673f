"""The drawings and tables of the chapter on quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd
import torch
from matplotlib.ticker import NullLocator

from memlab.book import drawing, show
from memlab.predict.measure import device_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

BLUE, ORANGE = show.COLOURS["parameters"], show.COLOURS["gradients"]
BLOCKS = (256, 128, 64, 32, 16)


def draw_block(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int = 4
) -> Figure:
    """A block of weights, the marks of a ruler that they go to, and what is stored of them.

    x: the weights, of 16 bits. codes: theirs, of so many bits. scale, zero: which they share.
    """
    fig, ax = drawing.sheet(2.4)
    green, step, low = show.COLOURS["optimizer_states"], 4.3 / (2**bits - 1), -(2 ** (bits - 1))
    marks = {code: 0.42 + (code - low) * step for code in range(low, -low)}
    small, tall = {"fontsize": drawing.SMALL}, 0.26
    arrow = {"arrowprops": {"arrowstyle": "->", "color": show.GREY, "lw": 1.2}}
    drawing.say(ax, 0.03, 2.24, "a block of weights, 16 bits each", **small)
    ax.plot([marks[low], marks[-low - 1]], [1.27] * 2, color=show.GREY, lw=1)
    for at in marks.values():
        ax.plot([at] * 2, [1.21, 1.33], color=show.GREY, lw=1)
    for number, code in zip(x.tolist(), codes.int().tolist(), strict=True):
        at = marks[0] + (number / scale.item() + zero.item()) * step
        drawing.block(ax, (at - 0.22, 1.82), (0.44, tall), BLUE, _signed(number, ".1f"))
        drawing.block(
            ax, (marks[code] - 0.135, 0.9), (0.27, tall), green, _signed(code), fontsize=10
        )
        ax.annotate("", (marks[code], 1.35), (at, 1.8), **arrow)
    taken = {*codes.int().tolist(), (null := int(zero))}
    free = next((c for c in marks if not taken & {c - 1, c, c + 1, c + 2}), None)
    drawing.block(ax, (marks[null] - 0.135, 0.9), (0.27, tall), ORANGE, _signed(null), fontsize=10)
    if free is not None:  # room to show the scale
        drawing.block(ax, (marks[free], 0.9), (step, tall), ORANGE, "S")
    drawing.say(ax, 0.03, 0.68, f"codes, {bits} bits each, and once for the block", **small)
    drawing.block(ax, (0.03, 0.2), (0.98, tall), ORANGE, f"S {scale.item():.4f}")
    drawing.say(ax, 1.1, 0.33, "from mark to mark", **small)
    drawing.block(ax, (2.75, 0.2), (0.56, tall), ORANGE, f"Z {_signed(null)}")
    drawing.say(ax, 3.4, 0.33, "the code of 0", **small)
    return fig


def _signed(number: float, form: str = "d") -> str:
    return f"{number:{form}}".replace("-", "\N{MINUS SIGN}")


def error_against_bits(points: Mapping[tuple, tuple[float, float]]) -> Figure:
    """points: as of `errors_by_bits`; a line for each width of code and of constant."""
    fig, ax = show.figure(6, 3.8)
    for bits, colour in zip((3, 4, 5), show.COLOURS.values(), strict=False):
        for constant, style in ((32, "o-"), (8, "o--")):
            line = [points[bits, size, constant] for size in BLOCKS]
            ax.semilogy(*zip(*line, strict=True), style, color=colour, mfc="none")
        end = points[bits, 16, 32]
        ax.text(*end, f"  {bits} bits", va="center", color=colour)
    ax.plot([], [], "-", color=show.GREY, label="constants in fp32")
    ax.plot([], [], "--", color=show.GREY, label="constants in 8 bits")
    ax.set(xlabel="bits per weight, all counted", ylabel="error", xlim=(2.9, 8.2))
    ax.set_yticks(ticks := [0.05, 0.1, 0.2, 0.3], [f"{t:.0%}" for t in ticks])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.legend()
    return fig


def marks_under_weights(tables: Mapping[str, torch.Tensor]) -> Figure:
    """The values of some formats under normal numbers, as shares of a block's largest."""
    torch.manual_seed(0)
    fig, ax = show.figure(6, 2.8)
    blocks = torch.randn(4096, 64)
    scaled = blocks / blocks.abs().amax(1, keepdim=True)
    shape = dict(bins=80, range=(-1, 1), density=True)
    ax.hist(scaled.flatten(), color=BLUE, alpha=0.4, **shape)
    for row, (name, table) in enumerate(tables.items(), start=1):
        ax.plot(table / table.max(), [-row / 4] * len(table), "|", ms=14, mew=2, color=ORANGE)
        ax.text(1.08, -row / 4, name, va="center")
    ax.set(yticks=[], xlabel="share of the block's largest value")
    return fig


def harm_of_outliers(mean: Mapping[str, list[float]], factors: list[int]) -> Figure:
    """A line for each scheme: what is added to the loss as two features grow by a factor."""
    fig, ax = show.figure(6, 3.6)
    for (name, line), colour in zip(mean.items(), show.COLOURS.values(), strict=False):
        ax.plot(factors, line, "o-", color=colour, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("symlog", linthresh=0.01)
    ax.set_xticks(factors, [str(f) for f in factors])
    ax.set(xlabel="how much two features have grown", ylim=(-0.003, 5))
    ax.set(ylabel="added to the loss")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def _table(frame: pd.DataFrame, caption: str, **digits: str) -> Styler:
    formats = {head: f"{{:{how}}}" for head, how in digits.items()}
    return frame.style.format(formats, na_rep="").set_caption(caption)


def table_of_sizes(frame: pd.DataFrame) -> Styler:
    """bits, and GiB of whole models."""
    digits = dict.fromkeys(frame.columns, ".1f") | {"bits": ".3f"}
    caption = "Bits of a weight, and Llama 3 8B and Llama 2 70B by arithmetic"
    return _table(frame, caption, **digits)


def table_of_formats(frame: pd.DataFrame) -> Styler:
    caption = "Bits a weight, error on two matrices, and loss (3 seeds)"
    return _table(frame, caption, bits=".3f", normal=".1%", trained=".1%")


def table_of_methods(frame: pd.DataFrame) -> Styler:
    return _table(frame, "Added to the loss (3 seeds); error of a 4-bit layer's output")


def table_of_quality(frame: pd.DataFrame) -> Styler:
    caption = "Published: Llama 3 8B on WikiText, lower is better"
    digits = {"bits": ".1f", "more": "+.1%", "perplexity": ".2f", "with data": ".2f"}
    return _table(frame, caption, **digits)


def table_of_layers(frame: pd.DataFrame, device: torch.device) -> Styler:
    caption = f"Bits a weight of a layer; measured on: {device_name(device)}"
    return _table(frame, caption, **dict.fromkeys(frame.columns, ".4f") | {"error": "+.3%"})
