"""What a drawing of one idea is made of: a sheet in inches, labelled blocks, words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from memlab.book import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.0  # inches of a sheet, which a phone shows at about two thirds
WORDS, SMALL = 12, 11  # points of its letters


def sheet(height: float) -> tuple[Figure, Axes]:
    """An empty drawing of `WIDTH`; coordinates are inches from the lower left corner."""
    fig, ax = show.figure(WIDTH, height)
    fig.set_layout_engine("none")
    ax.set_position((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, height))
    ax.set_axis_off()
    return fig, ax


def ink(colour: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = (
        c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
    )
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "white"


def block(
    ax: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    colour: str = "",
    label: str = "",
    **text: Any,
) -> None:
    """A filled box with its label inside; without a colour the empty place of one."""
    look = {"fc": colour, "ec": "none"} if colour else {"fc": "none", "ec": show.GREY, "ls": ":"}
    ax.add_patch(Rectangle(corner, *size, lw=0.8, **look))
    if label:
        middle = [at + long / 2 for at, long in zip(corner, size, strict=True)]
        look = {"fontsize": SMALL, "color": ink(colour) if colour else show.GREY}
        ax.text(*middle, label, ha="center", va="center_baseline", **look | text)


def say(ax: Axes, x: float, y: float, words: str, **how: Any) -> None:
    """Words on the sheet, centred on the height y."""
    ax.text(x, y, words, **{"fontsize": WORDS, "va": "center"} | how)
