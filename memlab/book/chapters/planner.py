"""Tables and figures of chapter 16, a call each, and what cards need by the formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from memlab.book import show
from memlab.footprint import StepTime
from memlab.gpus import GPU, find_gpu
from memlab.predict.fit import room
from memlab.predict.formula import formula
from memlab.spec.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

    from memlab.planner.result import Option, Plan

GiB = 2**30
TIERS = {1: "full", 2: "full, small states", 3: "LoRA", 4: "QLoRA", 5: "may train worse"}
WAYS = ("full", "full, sparing", "LoRA", "QLoRA")
# From GPT-2 with 124 million weights to Llama-2 70B.
MODELS = (
    "gpt2 bert-large qwen2.5-0.5b gpt2-large llama-3.2-1b qwen2.5-1.5b gpt2-xl llama-3.2-3b "
    "qwen2.5-7b llama-3-8b llama-2-70b"
).split()
CARDS = [find_gpu(name) for name in "T4 L4 RTX-4090 A100-40GB L40S A100-80GB H200".split()]
KERNELS = find_gpu("A100-80GB")  # whose kernels the formula asks for
Needs = Mapping[tuple[str, str], Mapping[str, float]]
Ways = Callable[[str], dict[str, Recipe]]


def called(option: Option) -> str:
    """The tier of an option, and whether it computes again."""
    return TIERS[option.tier] + " with checkpointing" * (option.recipe.checkpointing != "none")


def time_of(option: Option, card: GPU) -> StepTime:
    """The estimate of an option's step, with its range."""
    return formula(option.recipe, card).step_seconds


def rate_between(option: Option, card: GPU) -> str:
    """The range of an option's sequences a second."""
    time = time_of(option, card)
    assert time.samples is not None
    return show.between(time.samples / time.high, time.samples / time.low)


def tiers_figure(advice: Plan) -> Figure:
    """Bars of the best recipe of each tier, and of the one that leaves the most room."""
    recipes = {TIERS[tier]: option.recipe for tier, option in advice.tiers.items()}
    roomiest = advice.roomiest
    if roomiest and advice.fastest and roomiest.recipe != advice.fastest.recipe:
        recipes["most room"] = roomiest.recipe
    # Clipping holds less than a MiB.
    bars = {name: formula(r.but(max_grad_norm=0), advice.card) for name, r in recipes.items()}
    return show.bars(bars, limit=advice.card.name)


def switch_table(advice: Plan) -> Styler:
    """What single changes of the plain recipe save, and the factor on the time of a step."""
    before, rows = advice.start.seconds, {}
    for switch in advice.switches:
        known = switch.seconds is not None and before is not None
        factor = 1 + switch.seconds / before if known else None
        rows[switch.name] = {
            "saves, GiB": switch.saved / GiB,
            "factor on time": show.ratio_between(factor) if factor else "—",
            "enough": "yes" if switch.fits else "",
        }
    frame = pd.DataFrame(rows).T.infer_objects()
    return show.table(frame, f"From {advice.start.needed / GiB:,.1f} GiB; time estimated")


def needed(recipe: Recipe, card: GPU) -> float:
    """Bytes of the card, context included, by the formula with an A100's kernels."""
    return formula(recipe, KERNELS).peak_allocated + card.context


def needs_of(ways: Ways, names: Iterable[str] = MODELS) -> dict[tuple[str, str], dict[str, float]]:
    """(model, card) -> way -> bytes of the card, for each of `CARDS`.

    ways: model -> way -> recipe.
    """
    found = {}
    for name in names:
        recipes = ways(name)
        for card in CARDS:
            found[name, card.name] = {way: needed(one, card) for way, one in recipes.items()}
    return found


def smallest_card(needs: Needs, name: str, way: str) -> str:
    """The smallest card that the formula says will do, or "none"."""
    fit = [card for card in CARDS if needs[name, card.name][way] <= room(card)]
    return min(fit, key=lambda card: card.total_memory or 0).name if fit else "none"


def needs_figure(needs: Needs) -> Figure:
    """A mark a way, a row a model, over what the cards have."""
    names = list(dict.fromkeys(name for name, _ in needs))
    parts = ("optimizer_states", "gradients", "activations", "parameters")
    fig, ax = show.figure(7, 5.4)
    for way, mark, part in zip(WAYS, "o^sD", parts, strict=True):
        across = [needs[name, KERNELS.name][way] / GiB for name in names]
        ax.plot(across, names, mark, color=show.COLOURS[part], label=way, markersize=7)
    for name in names:
        ends = np.array([*needs[name, KERNELS.name].values()]) / GiB
        ax.plot([ends.min(), ends.max()], [name] * 2, color=show.GREY, lw=0.6)
    for name in ("T4", "RTX-4090", "A100-40GB", "A100-80GB", "H200"):
        limit = room(find_gpu(name)) / GiB
        ax.axvline(limit, color=show.GREY, linestyle="--", lw=0.9)
        label = name.replace("-", " ").replace("RTX ", "").replace("GB", "")
        at = dict(xycoords=("data", "axes fraction"), rotation=45, ha="left", va="bottom")
        ax.annotate(label, (limit, 1.01), **at)
    ax.set(xscale="log", xlabel="GiB of the card, 1 x 1,024 tokens")
    ax.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=4)
    return fig


def rent_table(recipe: Recipe, cards: Iterable[str], first: str) -> pd.DataFrame:
    """Seconds of a step on cards, and how many times as fast as the first each is, as ranges.

    A card that does not take the recipe is left out, and a line says why.
    """
    times = {}
    for name in cards:
        try:
            times[name] = formula(recipe, name).step_seconds
        except ValueError as problem:
            print(problem)
    first = first if first in times else next(iter(times))
    base = times[first]
    rows = {
        name: {
            "s a step, estimated": show.between(time.low, time.high),
            f"times as fast as the {first}": show.between(
                base.low / time.high, base.high / time.low
            ),
        }
        for name, time in times.items()
        if name != first
    }
    own = {"s a step, estimated": show.between(base.low, base.high)}
    return pd.DataFrame({first: own} | rows).T.fillna("")


def quantized(ways: Ways, names: Iterable[str] = MODELS) -> pd.DataFrame:
    """Peaks of LoRA and QLoRA in GiB, and what QLoRA saves in per cent."""
    rows = {}
    for name in names:
        lora, qlora = (formula(ways(name)[way], KERNELS).peak_allocated for way in WAYS[2:])
        rows[name] = {"LoRA, GiB": lora / GiB, "QLoRA, GiB": qlora / GiB}
        rows[name]["saved, %"] = 100 * (1 - qlora / lora)
    return pd.DataFrame(rows).T


BRANCHES = {
    "plain training fits": "full",
    "full fits when sparing": "full, sparing",
    "LoRA fits": "LoRA",
    "QLoRA fits": "QLoRA",
}


def branches(needs: Needs) -> pd.Series:
    """(model, card) -> the first of `BRANCHES` that fits, or "nothing fits"."""

    def branch(name: str, card: str) -> str:
        ways = needs[name, card]
        fit = (said for said, way in BRANCHES.items() if ways[way] <= room(find_gpu(card)))
        return next(fit, "nothing fits")

    return pd.Series({place: branch(*place) for place in needs})
