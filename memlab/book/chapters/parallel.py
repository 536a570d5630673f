"""Tables and figures of chapter 17, a call each, and mixtures of experts at full size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from memlab import models
from memlab.book import drawing, show
from memlab.book.lessons import small_config
from memlab.evidence.loops import kept_predictions
from memlab.evidence.records import find_records
from memlab.footprint import StepTime
from memlab.gpus import find_gpu
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GiB = 2**30
PARTS = ("parameters", "gradients", "optimizer_states", "activations", "temporary")


def live_rows(
    pairs: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]],
) -> pd.DataFrame:
    """Parts of the peak of a rank as simulated and as measured, MiB; way -> both breakdowns."""
    rows = {}
    for way, (here, there) in pairs.items():
        for part in PARTS:
            if there[part]:
                rows[f"{way}, {part.replace('_', ' ')}"] = {
                    "simulated, MiB": here[part] / MiB,
                    "measured here, MiB": there[part] / MiB,
                    "error": show.error(here[part], there[part]),
                    "difference, bytes": here[part] - there[part],
                }
    return pd.DataFrame(rows).T.astype({"difference, bytes": int})


def titan_table() -> pd.DataFrame:
    """torchtitan's published peaks beside the kept predictions, GiB."""
    said, rows = kept_predictions()["runs"]["published-torchtitan-h100.json"], {}
    for run in find_records(loop="torchtitan"):
        simulated = said[run.name]["peak_reserved_bytes"]
        known = run.figures["peak_reserved_bytes"]
        rows[run.name] = {
            "allocated, GiB": said[run.name]["peak_allocated_bytes"] / GiB,
            "reserved, GiB": simulated / GiB,
            "reserved, published, GiB": known / GiB,
            "error": show.error(simulated, known),
        }
    return pd.DataFrame(rows).T


def links_table(
    times: Mapping[str, StepTime],
    single: StepTime | None = None,
    group: str = " 8 ",
    ranks: int = 8,
) -> pd.DataFrame:
    """Seconds of a step over links as ranges, and the gain of several cards.

    times: label -> estimate of a step. single: of one card alone, of whose model the labels with
    `group` in them are; the gain is how many steps of it so many cards do in its time.
    """
    rows = {}
    for name, time in times.items():
        row = {"s a step": show.between(time.low, time.high), "gain": "—"}
        if single is not None and group in name:
            ends = ranks * single.low / time.low, ranks * single.high / time.high
            row["gain"] = show.between(*sorted(ends))
        rows[name] = row
    return pd.DataFrame(rows).T


def draw_shares(
    bytes_a_parameter: Callable[..., float], parts: tuple[int, int, int] = (4, 4, 8), ranks: int = 4
) -> Figure:
    """What each rank keeps under DDP and ZeRO 1 to 3, filled; dotted is what others keep.

    bytes_a_parameter: of (way, ranks, parts), what one rank keeps of a parameter.
    parts: bytes of parameter, gradient and states of one parameter, the heights of the lanes.
    """
    high, wide, left = 0.78, (drawing.WIDTH - 0.77) / ranks, 0.8
    fig, ax = drawing.sheet(0.25 + 4 * (high + 0.12))
    words = dict(zip(PARTS, ("parameters", "gradients", "states"), strict=False))
    for rank in range(ranks):
        head = left + wide * rank + (wide - 0.1) / 2
        drawing.say(ax, head, ax.get_ylim()[1] - 0.12, f"rank {rank}", ha="center")
    for row, way in enumerate(("ddp", "zero1", "zero2", "zero3")):
        top = ax.get_ylim()[1] - 0.25 - row * (high + 0.12)
        name = way.upper() if way == "ddp" else f"ZeRO {way[-1]}"
        drawing.say(ax, 0.03, top - high / 2 + 0.12, name, weight="bold")
        each = bytes_a_parameter(way, ranks, parts)
        drawing.say(ax, 0.03, top - high / 2 - 0.12, f"{each:g} bytes", fontsize=drawing.SMALL)
        for rank in range(ranks):
            y = top
            for number, (part, size) in enumerate(zip(words, parts, strict=True)):
                tall = high * size / sum(parts)
                y, x = y - tall, left + wide * rank
                split = way != "ddp" and number >= 3 - int(way[-1])
                start, share = (rank / ranks, 1 / ranks) if split else (0, 1)
                if split:
                    drawing.block(ax, (x, y), (wide - 0.1, tall))
                place = (x + start * (wide - 0.1), y), (share * (wide - 0.1), tall)
                label = words[part] if row == 0 and rank == 0 else ""
                drawing.block(ax, *place, show.COLOURS[part], label)
    return fig


def pipeline_figure(
    bubble: Callable[[int, int], float], stages: int = 4, batches: int = 6
) -> Figure:
    """GPipe's schedule, and the share of empty time over the number of micro-batches."""
    fig, (ax, share_ax) = show.figure(7, 3, ncols=2, width_ratios=(3, 2))
    hues, turn = ("parameters", "activations"), stages + batches - 1
    for s in range(stages):
        for b in range(batches):
            starts = s + b, turn + 2 * (stages - 1 - s + b)
            for start, wide, hue in zip(starts, (1, 2), hues, strict=True):
                ax.barh(s, wide, left=start, color=show.COLOURS[hue], edgecolor="w")
                ax.text(start + wide / 2, s, b + 1, ha="center", va="center", color="k")
    ax.invert_yaxis()
    ax.set(yticks=range(stages), ylabel="stage", xlabel="time", xlim=(0, 3 * turn))
    many = range(1, 65)
    for p in (2, 4, 8):
        share_ax.plot(many, [100 * bubble(p, m) for m in many], label=f"{p} stages")
    share_ax.set(xlabel="micro-batches", ylabel="bubble, %", ylim=(0, 100))
    share_ax.legend()
    return fig


def all_reduces(model: str, tokens: int, ranks: int) -> tuple[int, float]:
    """(bytes of one all-reduce of tensor parallelism in bf16, bytes that a rank sends a step)."""
    config = models.config(model)
    once = tokens * config.hidden_size * 2
    return once, 4 * config.num_hidden_layers * once * 2 * (ranks - 1) / ranks


def mixture(experts: int, active: int, width: int) -> dict[str, float]:
    """Mixtral with other experts: parameters, what bf16 training holds of them, operations of a
    step of 1,024 tokens by runs of one and two layers."""

    def layers(n: int) -> Any:
        shallow = type(config).from_dict(config.to_dict())
        shallow.num_hidden_layers = n
        return shallow

    sizes = dict(num_local_experts=experts, num_experts_per_tok=active)
    config: Any = small_config("mixtral-8x7b", intermediate_size=width, **sizes)
    total, used = models.active_parameters(config)
    recipe = Recipe(layers(1), seq_len=1024, precision="bf16", attention="sdpa")
    card = find_gpu("H100").without_limit()
    work = [simulate(recipe.but(model=layers(n)), card).step_seconds.flops for n in (1, 2)]
    return {
        "parameters, billions": total / 1e9,
        "active, billions": used / 1e9,
        "held, GiB": 8 * total / GiB,
        "TFLOP a step": (work[0] + (config.num_hidden_layers - 1) * (work[1] - work[0])) / 1e12,
    }


def mixtures(sizes: Mapping[str, Sequence[int]]) -> pd.DataFrame:
    """`mixture` of each (experts, active, width), a row each."""
    return pd.DataFrame({name: mixture(*size) for name, size in sizes.items()}).T


def times_of_first(table: pd.DataFrame, column: str) -> list[float]:
    """Of a column, how many times the first row's the others are."""
    first, *others = table[column]
    return [one / first for one in others]


def means(reports: Iterable[Mapping[str, Any]], way: str) -> list[float]:
    """The mean loss of the ranks at each step; a report holds (losses, breakdown) of a way."""
    return pd.DataFrame([one[way][0] for one in reports]).mean().tolist()
