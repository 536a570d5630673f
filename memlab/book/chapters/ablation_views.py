"""Tables and figures of chapter 15, a call each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from memlab.book import show
from memlab.book.chapters.ablation import Point, as_quick, front, plainest
from memlab.footprint import Footprint
from memlab.gpus import find_gpu
from memlab.units import MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

    from memlab.evidence.records import Record

GiB = 2**30
SHORT = {"bert-large": "BERT", "llama-3.2-1b": "1B", "llama-3-8b": "8B"}
MARGIN = 0.05  # of the card, that stays free in the table of named recipes


def seconds_of(run: Record) -> float:
    """Seconds of a step of a printed run: 4 sequences each."""
    return 4 / run.figures["samples_per_second"]


def held(run: Record) -> int:
    """Bytes that a printed run took beside the card's context."""
    return run.figures["device_used_bytes"] - run.figures["context_bytes"]


def draw(ax: Any, spots: Iterable[tuple[float, float]], *look: Any, **more: Any) -> None:
    """Recipes on the axes, from seconds and bytes."""
    across, up = zip(*spots, strict=True)
    ax.plot(across, [peak / GiB for peak in up], *look, **more)


def spots_of(points: Iterable[Point]) -> list[tuple[float, float]]:
    """Seconds and bytes of points."""
    return [(point.seconds, point.peak) for point in points]


def cloud(
    points: list[Point], nine: Mapping[str, Footprint], printed: Record | None = None
) -> Figure:
    """All recipes on one card, the runs of the guide with their numbers, and both fronts.

    printed: a run of the guide whose printed figures get a star.
    """
    hues = show.COLOURS
    fig, ax = show.figure(6.6, 4)
    draw(ax, spots_of(points), ".", color=show.GREY, alpha=0.6, label="a recipe")
    runs = [(run.step_seconds.expected, run.peak_allocated) for run in nine.values()]
    draw(ax, runs, "s", color=hues["gradients"], label="the nine runs, in order")
    for number, (across, up) in enumerate(runs, start=1):
        ax.annotate(number, (across, up / GiB), (5, 2), textcoords="offset points", fontsize=9)
    whole = [point for point in points if point.choice[-1] == "all weights"]
    for label, some, hue in (
        ("best, adapters too", points, "temporary"),
        ("best, all weights", whole, "parameters"),
    ):
        draw(ax, spots_of(front(some)), "o-", color=hues[hue], label=label)
    if printed is not None:
        star = seconds_of(printed), held(printed) / GiB
        ax.plot(*star, "*", markersize=16, color=hues["activations"])
        clear = {"xytext": (0.28, 0.68), "textcoords": "axes fraction"}
        line = {"arrowstyle": "-", "color": show.GREY}
        ax.annotate("9, printed (reserved)", star, **clear, arrowprops=line)
    ax.set(xlabel="seconds a step (estimated)", ylabel="peak, GiB", xlim=0, ylim=0)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def nine_runs(
    nine: Mapping[str, Record],
    guessed: Mapping[str, Footprint],
    simulated: Mapping[str, Footprint],
) -> pd.DataFrame:
    """The nine rows in MiB and seconds of a run, beside what was printed.

    guessed: whose seconds count; simulated: whose reserved bytes do, and the printed context.
    """
    rows = {}
    for name, run in nine.items():
        printed, time = run.figures, guessed[name].step_seconds
        memory = simulated[name].peak_reserved + printed["context_bytes"]
        steps = printed["run_seconds"] / seconds_of(run)
        rows[name] = {
            "MiB": memory / MiB,
            "printed": printed["device_used_bytes"] / MiB,
            "error in bytes": show.error(memory, printed["device_used_bytes"]),
            "s a run": steps * time.expected,
            "low": steps * time.low,
            "high": steps * time.high,
            "s printed": printed["run_seconds"],
            "error in seconds": show.error(steps * time.expected, printed["run_seconds"]),
        }
    return pd.DataFrame(rows).T


def nine_table(runs: pd.DataFrame) -> Styler:
    """`nine_runs`, with the estimated seconds as a range."""
    short = [name.replace("accumulation", "acc.") for name in runs.index]
    short = [name.replace("checkpointing", "ckpt.") for name in short]
    shown = runs[["MiB", "printed", "error in bytes"]].set_axis(short)
    ends = zip(runs["low"], runs["high"], strict=True)
    shown["s a run, estimated"] = [show.between(*pair) for pair in ends]
    shown["s printed"] = runs["s printed"].to_numpy()
    caption = "BERT-large on a V100, 4 x 512 tokens a step"
    caption += "; acc.: accumulation, ckpt.: checkpointing"
    plain = ["MiB", "printed", "s printed"]
    return show.table(shown, caption).format("{:,.0f}", subset=plain)


def first_and_last(
    saving: Callable[..., tuple[float, float]], sets: Iterable[frozenset[str]]
) -> pd.DataFrame:
    """What each switch saves first, last, at most and at least, MiB, and its factor on time.

    saving: (switch, set that is on) -> (MiB, factor); sets: all sets of switches.
    """
    sets = list(sets)
    everything, rows = max(sets, key=len), {}
    for switch in [name for one in sets if len(one) == 1 for name in one]:
        every = [saving(switch, on) for on in sets if switch not in on]
        first, last = saving(switch, frozenset()), saving(switch, everything - {switch})
        rows[switch] = {
            "first, MiB": first[0],
            "last, MiB": last[0],
            "most": max(mib for mib, _ in every),
            "least": min(mib for mib, _ in every),
            "time, first": first[1],
            "time, last": last[1],
        }
    return pd.DataFrame(rows).T


def order_table(order: pd.DataFrame) -> Styler:
    """`first_and_last`, with factors on time as ranges."""
    shown = order.copy().astype(object)
    for column in ("time, first", "time, last"):
        shown[column] = order[column].map(show.ratio_between)
    caption = "What a switch saves first and last; factor on the time of a step"
    plain = [column for column in order if not column.startswith("time")]
    return show.table(shown, caption).format("{:,.0f}", subset=plain)


def nine_fronts(grid: Mapping[tuple[str, str], list[Point]]) -> Figure:
    """A small picture for each model (a row) and card (a column), on logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    models, cards = (list(dict.fromkeys(place[i] for place in grid)) for i in (0, 1))
    rows, columns = len(models), len(cards)
    fig, axes = show.figure(7, 6.4, nrows=rows, ncols=columns, sharey="row", squeeze=False)
    for (model, card), points in grid.items():
        ax = axes[models.index(model)][cards.index(card)]
        faint = dict(color=show.GREY, alpha=0.5, markersize=4)
        draw(ax, spots_of(points), ".", **faint)
        best = dict(color=show.COLOURS["parameters"], markersize=4)
        draw(ax, spots_of(front(points)), "o-", **best)
        usable = find_gpu(card).usable or 0
        ax.axhline(usable / GiB, color=show.COLOURS["temporary"], ls="--")
        ax.set(xscale="log", yscale="log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        ax.tick_params(labelsize=8)
        if card == cards[0]:
            ax.set_ylabel(f"{model}\nGiB", fontsize=9)
        if model == models[0]:
            ax.set_title(card, fontsize=10)
        if model == models[-1]:
            ax.set_xlabel("seconds a step", fontsize=9)
    return fig


class Pick(NamedTuple):
    """What to take of a model on a card: the plainest of the quick, how many others the estimate
    cannot tell from the fastest, and the smallest."""

    quick: Point
    as_quick: int
    smallest: Point


def picks(grid: Mapping[tuple[str, str], list[Point]]) -> dict[str, Pick]:
    """ "model, card" -> what to take of the recipes that fit with 5 % to spare."""
    found = {}
    for (model, card), points in grid.items():
        room = (1 - MARGIN) * (find_gpu(card).usable or 0)
        fit = [point for point in points if point.peak <= room]
        if not fit:
            print(f"no recipe of {model} fits {card}")
            continue
        near = as_quick(fit)
        least = min(fit, key=lambda p: p.peak)
        found[f"{SHORT.get(model, model)}, {card}"] = Pick(plainest(near), len(near) - 1, least)
    return found


def picks_table(found: Mapping[str, Pick]) -> Styler:
    """`picks` with GiB and the range of the estimated seconds."""
    rows = {
        name: {
            "plainest of the quick": pick.quick.name.replace(", sdpa", ""),
            "GiB": pick.quick.peak / GiB,
            "s a step": show.between(*pick.quick.span),
            "as quick": pick.as_quick,
            "smallest, GiB": pick.smallest.peak / GiB,
        }
        for name, pick in found.items()
    }
    return show.table(pd.DataFrame(rows).T.infer_objects(), "Recipes that fit, all with sdpa")


def all_pairs(interaction: Callable[[str, str], float], switches: Iterable[str]) -> pd.DataFrame:
    """The interaction of each switch with each other, MiB."""
    names = list(switches)
    rows = {a: {b: interaction(a, b) for b in names if b != a} for a in names}
    return pd.DataFrame(rows, names)


def pairs_table(pairs: pd.DataFrame) -> Styler:
    """`all_pairs` with what two switches save together beyond each alone."""
    caption = "Saved together beyond each alone, MiB"
    return show.table(pairs, caption).format("{:,.0f}", na_rep="—")


def ends_figure(ends: Mapping[str, list[float]], plain: str, names: Mapping[str, str]) -> Figure:
    """Held-out losses, a dot a seed, a line a recipe; the band is what `plain`'s seeds span.

    names: recipe -> how it is called in the picture.
    """
    fig, ax = show.figure(7, 0.8 + 0.27 * len(ends))
    ax.axvspan(min(ends[plain]), max(ends[plain]), color=show.GREY, alpha=0.2)
    for y, (name, losses) in enumerate(ends.items()):
        hue = show.COLOURS["activations" if "backward" in name else "parameters"]
        ax.plot(losses, [y] * len(losses), "o", color=hue, alpha=0.8)
    ax.set_yticks(range(len(ends)), [names.get(name, name) for name in ends])
    ax.invert_yaxis()
    ax.set(xlabel="loss of text that was not trained on")
    return fig
