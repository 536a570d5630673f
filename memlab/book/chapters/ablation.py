"""Every sensible combination of the book's techniques: peaks, seconds, and the front of the best.

One optimizer step is always `SAMPLES` sequences of `LENGTH` tokens, whatever it is cut into.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from memlab.book.panel import Panel
from memlab.card.step_time import ANCHORED
from memlab.gpus import GPU, find_gpu
from memlab.predict.formula import formula
from memlab.spec.recipe import Recipe

SAMPLES, LENGTH = 4, 512
MODELS = ("bert-large", "llama-3.2-1b", "llama-3-8b")
CARDS = ("T4", "RTX-4090", "H100")
# switch -> its settings, each with the fields of a recipe; the first is how plain training has it
SWITCHES = {
    "batch": {
        f"{one} x {SAMPLES // one}": {"batch_size": one, "accumulation": SAMPLES // one}
        for one in (4, 2, 1)
    },
    "checkpointing": {"no checkpoints": {}, "checkpoints": {"checkpointing": "non-reentrant"}},
    "precision": {name: {"precision": name} for name in ("fp32", "fp16-amp", "bf16-amp", "bf16")},
    "optimizer": {
        "AdamW": {"optimizer": "adamw_torch_fused"},
        "8-bit AdamW": {"optimizer": "adamw_8bit"},
        "Adafactor": {"optimizer": "adafactor"},
        "SGD": {"optimizer": "sgd"},
    },
    "attention": {name: {"attention": name} for name in ("eager", "sdpa")},
    "trained": {
        "all weights": {},
        "LoRA": {"lora_rank": 16},
        # What is not quantized stays as it is loaded: nothing is cast to fp32.
        "QLoRA": {"lora_rank": 16, "base": "nf4", "double_quant": True, "upcast": False},
    },
}


def sensible(choice: tuple[str, ...]) -> bool:
    """Whether settings, one of each switch in their order, are worth a look together.

    Adapters have so few states that no optimizer saves some, and nobody who needs them computes
    in fp32 or keeps the matrices of eager attention. Under autocast LoRA's base is in fp32, and
    nothing of QLoRA's is: where a card has bf16, QLoRA stands beside a LoRA in bf16 alone.
    """
    _, _, precision, optimizer, attention, trained = choice
    if trained == "QLoRA" and precision == "bf16-amp":
        return False
    return trained == "all weights" or (
        precision != "fp32" and optimizer == "AdamW" and attention == "sdpa"
    )


def asked_of(choice: tuple[str, ...], card: GPU) -> bool:
    """Whether a card computes in the precision of some settings, and is asked for it."""
    native = "bfloat16" in card.native_dtypes
    _, _, precision, *_, trained = choice
    if precision.startswith("bf16"):
        return native
    return not (native and trained == "QLoRA")


CHOICES = [choice for choice in itertools.product(*SWITCHES.values()) if sensible(choice)]


def fields_of(choice: tuple[str, ...]) -> dict:
    """The fields of a recipe that settings, one of each switch in their order, stand for."""
    pairs = zip(SWITCHES.values(), choice, strict=True)
    return {name: v for settings, one in pairs for name, v in settings[one].items()}


@dataclasses.dataclass(frozen=True)
class Point:
    """A combination on a card: its settings, bytes at the peak and estimated seconds of a step.

    kept: bytes of parameters, gradients and optimizer states at the peak. span: the lowest and
    the highest seconds of the estimate.
    """

    choice: tuple[str, ...]
    peak: int
    seconds: float
    kept: int
    span: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        """What differs from plain training."""
        plain = (next(iter(settings)) for settings in SWITCHES.values())
        changed = [one for one, usual in zip(self.choice, plain, strict=True) if one != usual]
        return ", ".join(changed) or "plain"


def combinations(model: str, gpu: str) -> list[Point]:
    """A point for each of `CHOICES` that a card is asked for, in their order, by `formula`.

    The memory of the card sets no limit. Raises ValueError for an unknown model or card.
    """
    card, points = find_gpu(gpu).without_limit(), []
    for choice in CHOICES:
        if not asked_of(choice, card):
            continue
        fields = fields_of(choice)
        run = formula(Recipe(model, seq_len=LENGTH, **fields), card)
        kept = sum(run.breakdown[n] for n in ("parameters", "gradients", "optimizer_states"))
        time = run.step_seconds
        span = time.low, time.high
        points.append(Point(choice, run.peak_allocated, time.expected, kept, span))
    return points


def taken(
    switches: Mapping[str, Mapping[str, Any]], start: Recipe, card: GPU
) -> dict[str, Mapping[str, Any]]:
    """The switches that a card takes, each by itself and with all before it; of the others a line
    says why not."""
    allowed: dict[str, Mapping[str, Any]] = {}
    together: dict[str, Any] = {}
    for name, fields in switches.items():
        try:
            for asked in (fields, together | dict(fields)):
                formula(start.but(**asked), card)
        except ValueError as problem:
            print(f"{name} is left out: {problem}")
        else:
            allowed[name], together = fields, together | dict(fields)
    return allowed


def as_quick(points: list[Point]) -> list[Point]:
    """The points that the estimate cannot tell from the fastest of them."""
    least = min(point.seconds for point in points)
    return [point for point in points if point.seconds <= ANCHORED * least]


def plainest(points: list[Point]) -> Point:
    """The point that changes the fewest switches, of equals the smallest.

    sdpa is what attention is today, and weights in bf16 alone are less plain than autocast.
    """

    def changes(point: Point) -> tuple[bool, int, bool, int]:
        count = sum(a != b for a, b in zip(point.choice, CHOICES[0], strict=True))
        return "eager" in point.choice, count, "bf16" in point.choice, point.peak

    return min(points, key=changes)


def front(points: list[Point]) -> list[Point]:
    """The points that no other beats in both memory and time (Pareto), the fastest first."""
    best = []
    for point in sorted(points, key=lambda p: (p.seconds, p.peak)):
        if not best or point.peak < best[-1].peak:
            best.append(point)
    return best


class AblationPanel(Panel):
    """All combinations as points: two axes to choose, and the recipe of the point that is met.

    grid: (model, card) -> its points, as `combinations` gives them, for each pair of both.

    Raises ValueError for a pair without points.
    """

    kind = "ablation"
    still = "This panel needs scripts. It shows the recipe behind each point of the grid."

    def __init__(self, grid: dict[tuple[str, str], list[Point]]):
        models, cards = ({place[i] for place in grid} for i in (0, 1))
        for place in itertools.product(models, cards):
            if not grid.get(place):
                raise ValueError(f"grid has no points for {place}: allowed are some for each pair")
        self.grid = grid

    def data(self) -> dict:
        """Points as [number of the choice, peak and kept in KiB, microseconds of a step, the
        range of these in thousandths of them]."""
        number = {choice: i for i, choice in enumerate(CHOICES)}
        places = {name: list(settings) for name, settings in SWITCHES.items()}
        return {
            "samples": SAMPLES,
            "apart": ANCHORED,
            "length": LENGTH,
            "switches": places,
            "code": {
                setting: ", ".join(f"{name}={value!r}" for name, value in fields.items())
                for settings in SWITCHES.values()
                for setting, fields in settings.items()
            },
            "choices": [
                "".join(str(places[name].index(one)) for name, one in zip(places, c, strict=True))
                for c in CHOICES
            ],
            "grid": [
                {
                    "model": model,
                    "card": find_gpu(card).name,
                    "usable": find_gpu(card).usable,
                    "points": [
                        [number[p.choice], p.peak >> 10, p.kept >> 10, round(p.seconds * 1e6)]
                        + [round(1e3 * end / p.seconds) for end in p.span]
                        for p in points
                    ],
                }
                for (model, card), points in self.grid.items()
            ],
        }
