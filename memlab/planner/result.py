"""The question that a plan answers, the options that it compares, and the answer as text and JSON.

All sizes are bytes inside and GiB in print.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from memlab.fields import MOST_MICRO_BATCHES, integer_from, invalid_value, one_of
from memlab.footprint import Category
from memlab.gpus import GPU
from memlab.spec.optimizers import OPTIMIZERS
from memlab.spec.recipe import AUTOCAST, COMPUTED_IN, QUANTIZED, Recipe
from memlab.units import GiB, gib, seconds_text

if TYPE_CHECKING:
    from memlab.models import Model

WAYS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
WORST = 5
# What is trained, ordered by what it may cost in quality.
TIERS = {
    1: "every weight, AdamW's states in 32 bits",
    2: "every weight, states in 8 bits or factored",
    3: "adapters",
    4: "adapters on a base in 4 or 8 bits",
    WORST: "what may train worse: trained weights in pure half precision, SGD, Lion",
}
FASTEST, ROOMIEST = "fastest", "most room"
SLOW = 1.5  # times the fastest: a slower first choice is said to be so
NO_TIME = 1e-6  # seconds: a smaller difference is printed as "as long"
WIDTH = 78  # columns of a terminal, and of a page
PAGED_OUT = " (all states paged out)"  # an assumption: the driver decides what leaves the GPU
STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES)


@dataclass(frozen=True)
class Question:
    """What to train, and what the planner may choose.

    model, task, seq_len, lora_rank, ranks, expandable_segments: as in `Recipe`.
    link: between ranks, as in `simulate`.
    effective_batch: sequences per optimizer step, over all ranks; a multiple of `ranks`.
    ways: names of `WAYS` that may be used, the preferred one first; a tuple, or a text with commas.
    precisions: values of `Recipe.precision` that may be used, in the same form. None takes those
        that the GPU is made for.
    keep_quality: leave out what may train worse: weights trained in pure half precision, and
        optimizers other than AdamW and Adafactor.

    Raises ValueError in one line for a field with an invalid value.
    """

    model: Model
    seq_len: int = 512
    effective_batch: int = 16
    ways: tuple[str, ...] = tuple(WAYS)
    precisions: tuple[str, ...] | None = None
    keep_quality: bool = True
    lora_rank: int = 16
    task: str | None = None
    ranks: int = 1
    link: str | None = None
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        for name in ("ways", "precisions"):
            value = getattr(self, name)
            value = tuple(value.split(",")) if isinstance(value, str) else value
            value = None if value is None else tuple(value)
            object.__setattr__(self, name, value)
        if not self.ways:
            raise invalid_value("ways", self.ways, ", ".join(WAYS))
        for way in self.ways:
            one_of("ways", way, WAYS)
        for precision in self.precisions or ():
            one_of("precisions", precision, COMPUTED_IN)
        for name in ("seq_len", "lora_rank", "ranks"):
            integer_from(1)(name, getattr(self, name))
        integer_from(1, MOST_MICRO_BATCHES)("effective_batch", self.effective_batch)
        one_of("expandable_segments", self.expandable_segments, (True, False))
        if self.effective_batch % self.ranks:
            what = f"multiples of ranks, which is {self.ranks}"
            raise invalid_value("effective_batch", self.effective_batch, what)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return vars(self) | {"model": name_of_model(self.model)}


def plain(value: Any) -> Any:
    """Convert nested values to plain JSON values; objects by their `as_dict`."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value.as_dict() if hasattr(value, "as_dict") else value


def name_of_model(model: Model) -> str:
    return model if isinstance(model, str) else getattr(model, "model_type", "a config")


@dataclass(frozen=True)
class Option:
    """A recipe on a GPU, in bytes and seconds.

    needed: bytes of GPU memory, context included, as in `Fit`. Paged optimizer states count as if
        all of them were paged out.
    margin: bytes kept free on top.
    total_memory: bytes of the GPU.
    seconds: estimated, per optimizer step; None if unknown, as for paged states.
    at_least: True if `needed` counts weights, gradients and states only, because these alone do not
        fit. In all other options of an answer, `needed` comes from a simulation.
    largest_batch, longest: the largest micro-batch, and the longest sequence in steps of 64 tokens,
        that fit with all else unchanged. None if nobody looked for them.
    longest_ends: why there is no longer sequence; empty if the next one does not fit.
    """

    recipe: Recipe
    needed: int
    margin: int
    total_memory: int
    seconds: float | None
    at_least: bool = False
    largest_batch: int | None = None
    longest: int | None = None
    longest_ends: str = ""

    @property
    def missing(self) -> int:
        """Bytes that the GPU lacks, margin included; 0 if the recipe fits."""
        return max(0, self.needed + self.margin - self.total_memory)

    @property
    def way(self) -> str:
        """One of `WAYS`."""
        return way_of(self.recipe)

    @property
    def tier(self) -> int:
        """One of `TIERS`."""
        return tier_of(self.way, self.recipe.precision, self.recipe.optimizer)

    @property
    def samples_per_second(self) -> float | None:
        """Estimated sequences per second, of all ranks together; None without an estimate."""
        sequences = self.recipe.batch_size * self.recipe.accumulation * self.recipe.ranks
        return None if self.seconds is None else sequences / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return vars(self) | {
            "recipe": self.recipe.as_dict(),
            "way": self.way,
            "tier": self.tier,
            "missing": self.missing,
            "samples_per_second": self.samples_per_second,
        }

    def __str__(self) -> str:
        return f"{described(self.recipe)}: {self.bytes_and_seconds()}"

    def bytes_and_seconds(self) -> str:
        """The bytes that the recipe needs or lacks, and the time of a step, as text."""
        text = gib(self.needed)
        if self.missing:
            text = f"{'over ' * self.at_least}{text}, {gib(self.missing)} too many with the margin"
        text += PAGED_OUT * is_paged(self.recipe.optimizer)
        return f"{text}, {self.time()}" if self.seconds else text

    def time(self) -> str:
        """Seconds per step and sequences per second as text; only for an option with seconds."""
        assert self.seconds is not None
        return f"{seconds_text(self.seconds)} a step, {self.rate()} sequences/s"

    def rate(self) -> str:
        """Sequences per second as text, to three significant figures."""
        rate = self.samples_per_second
        if not rate:
            return "unknown"
        return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"

    def sizes(self) -> str:
        """The largest micro-batch and the longest sequence as text; only where both are known."""
        assert self.largest_batch is not None and self.longest is not None
        ends = self.longest_ends or f"{self.longest + 64:,} does not fit"
        if (
            not self.longest_ends
            and self.recipe.task == "causal-lm"
            and self.recipe.loss == "whole"
        ):
            ends += " with all logits at once"
        return (
            f"largest micro-batch {self.largest_batch:,} ({self.largest_batch + 1:,} does not "
            f"fit), longest sequence {self.longest:,} tokens ({ends})"
        )


def is_paged(optimizer: str) -> bool:
    """Whether an optimizer's states may be paged out to the host, whose time is not estimated."""
    return OPTIMIZERS[optimizer].paged


def way_of(recipe: Recipe) -> str:
    """The key of `WAYS` that says how a recipe trains."""
    return "qlora" if recipe.base in QUANTIZED else "lora" if recipe.lora_rank else "full"


def tier_of(way: str, precision: str, optimizer: str) -> int:
    """The key of `TIERS` that says what a training may cost in quality."""
    if precision in ("fp16", "bf16") or OPTIMIZERS[optimizer].worse:
        return WORST
    if way != "full":
        return {"lora": 3, "qlora": 4}[way]
    properties = OPTIMIZERS[optimizer]
    # Adafactor's states are factored: the table gives them as 0 per weight.
    return 1 if properties.states and properties.bits == 32 else 2


def way_in_words(recipe: Recipe) -> str:
    """How a recipe trains, in words; for adapters with the number format of their frozen base."""
    way = way_of(recipe)
    if way == "full":
        return WAYS[way]
    base = recipe.base
    if way == "lora":
        base = COMPUTED_IN[recipe.precision]
        if recipe.precision in AUTOCAST and recipe.base == "none":
            base = "fp32"  # autocast casts copies, the stored weights stay in fp32
    return f"{WAYS[way]} on {base} weights"


def described(recipe: Recipe) -> str:
    """A recipe in words, with the fields that a plan chooses."""
    parts = [way_in_words(recipe), recipe.precision, recipe.optimizer]
    parts += ["checkpointing"] if recipe.checkpointing != "none" else []
    parts += [f"{recipe.loss} loss"] if recipe.loss != "whole" else []
    parts += ["step in backward"] if recipe.step_in_backward else []
    away = {"none": [], "states": ["states on the host"]}
    parts += away.get(recipe.optimizer_offload, ["gradients and states on the host"])
    parts += [recipe.sharding] if recipe.ranks > 1 else []
    parts.append(f"micro-batch {recipe.batch_size} x {recipe.accumulation}")
    return ", ".join(parts)


@dataclass(frozen=True)
class Switch:
    """One change to a recipe.

    name: the change in words.
    saved: bytes of tensors that it saves at the peak; negative if it needs more.
    seconds: by how much it makes a step longer; negative if shorter, None if unknown.
    fits: whether the changed recipe fits the GPU.
    """

    name: str
    saved: int
    seconds: float | None
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(vars(self))


@dataclass(frozen=True)
class Plan:
    """The planner's answer for one GPU.

    fastest, roomiest: the options that fit with the shortest step, and with the most bytes left.
        None if nothing fits.
    tiers: tier of `TIERS` -> its best option. If none fits, its most sparing recipe with one
        sequence.
    start: the first of `tiers` that fits, else the one that lacks least.
    switches: single changes to `start`, the one that saves most first.
    decision: sentences on what decides whether `start` fits.
    remedies: if nothing fits, what would.
    excluded: what was not considered, and why.
    room: bytes, context included, that a recipe may be predicted to need.
    assumptions: behind the figures of all these options, as in `memlab.footprint.Footprint`.
    last_resorts: if nothing else fits, the more sparing ways to train every weight that do.
    """

    question: Question
    card: GPU
    fastest: Option | None
    roomiest: Option | None
    tiers: dict[int, Option]
    start: Option
    switches: tuple[Switch, ...]
    decision: tuple[str, ...]
    remedies: tuple[str, ...]
    excluded: tuple[str, ...]
    room: int
    assumptions: tuple[str, ...] = ()
    last_resorts: tuple[Option, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything fits."""
        return self.fastest is not None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        # The GPU is given by name and size, not with all its rates.
        values = vars(self) | {
            "gpu": self.card.name,
            "total_memory": self.card.total_memory,
            "fits": bool(self),
            "rungs": self.last_resorts,
        }
        del values["card"], values["last_resorts"]
        return plain(values)

    @property
    def first(self) -> Option | None:
        """The option that fits and may cost least in quality; None if nothing fits."""
        return next((best for _, best in sorted(self.tiers.items()) if not best.missing), None)

    def __str__(self) -> str:
        asked, card = self.question, self.card
        assert card.total_memory is not None  # a plan is for a card with a limit
        of_card = f"{self.room / GiB:,.1f} of the card's {gib(card.total_memory)}"
        head = (
            f"{asked.effective_batch} sequences of {asked.seq_len:,} tokens per step. GiB include "
            f"the context; {of_card} may be used."
        )
        lines = [f"{self.verdict()}.", *self._choice(), head, "", _table(self.tiers.values())]
        legend = "; ".join(f"{tier} {what}" for tier, what in TIERS.items() if tier in self.tiers)
        lines += [f"Tiers, by what they may cost in quality: {legend}.", ""]
        if self.fastest and self.roomiest:
            # One recipe may be both the fastest and the roomiest: then it gets one line.
            same = _is_same(self.fastest.recipe, self.roomiest.recipe)
            sized = {FASTEST: self.fastest, ROOMIEST: self.roomiest}
            for name, option in list(sized.items())[: 2 - same]:
                sizes = f"; {option.sizes()}" if option.longest is not None else ""
                lines.append(f"{name[0].upper()}{name[1:]}: {option}{sizes}.")
        else:
            lines += ["What would fit:", *(f"- {remedy}" for remedy in self.remedies)]
        if self.switches:
            start = f"{described(self.start.recipe)}, {gib(self.start.needed)}"
            heads = ["change", "saves GiB", "a step takes", "fits"]
            rows, columns = map(_change, self.switches), ("left", "right", "right", "left")
            table = tabulate(rows, heads, colalign=columns, disable_numparse=True)
            lines += [f"One change at a time from {start}:", "", table, ""]
        lines += self.decision
        lines += [f"Left out: {reason}." for reason in self.excluded]
        lines += [f"Assumed: {assumption}." for assumption in self.assumptions]
        return "\n".join(map(wrapped, lines))

    def verdict(self) -> str:
        """The answer in one line, without a full stop."""
        cards = f"{self.question.ranks} x " if self.question.ranks > 1 else ""
        begin = f"{name_of_model(self.question.model)} on {cards}{self.card.in_words}: "
        first = self.first
        if not first:
            return f"{begin}nothing fits"
        way, total = way_in_words(first.recipe), gib(first.total_memory)
        return f"{begin}{way} fits, {first.needed / GiB:,.1f} of {total}"

    def _choice(self) -> list[str]:
        """Lines with the recipe that the verdict is about and, if it is another, the fastest."""
        first, fastest = self.first, self.fastest
        if not first or not fastest:
            return []
        if _is_same(first.recipe, fastest.recipe):
            return [f"Tier {first.tier}, and fastest: {in_short(first.recipe)}."]
        times = ""
        if first.seconds and fastest.seconds and first.seconds >= SLOW * fastest.seconds:
            times = f", {first.seconds / fastest.seconds:.2g} times as fast"
        return [
            f"Tier {first.tier}: {in_short(first.recipe)}.",
            f"Fastest is tier {fastest.tier}, {described(fastest.recipe)}{times}.",
        ]


def in_short(recipe: Recipe) -> str:
    """A recipe in words, without how it trains."""
    return described(recipe).removeprefix(f"{way_in_words(recipe)}, ")


def wrapped(text: str) -> str:
    """Wrap a paragraph to the width of a terminal; text with line breaks is a table and stays."""
    if "\n" in text:
        return text
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _table(options: Iterable[Option]) -> str:
    """A text table with one row per option."""
    rows = []
    for option in options:
        recipe = option.recipe
        more = [recipe.sharding] * (recipe.ranks > 1)
        again = "yes" if recipe.checkpointing != "none" else "no"
        rows.append(
            [
                f"{option.tier} {WAYS[option.way].removesuffix(' fine-tuning')}",
                recipe.precision,
                "\n".join([recipe.optimizer, *more]),  # in one line the table would be too wide
                f"{again} *" if recipe.loss != "whole" else again,
                f"{recipe.batch_size} x {recipe.accumulation}",
                f"{'>' * option.at_least}{option.needed / GiB:,.1f}",
                f"{option.missing / GiB:,.1f}" if option.missing else "",
                seconds_text(option.seconds) if option.seconds else "unknown",
            ]
        )
    heads = ["tier", "in", "optimizer", "ckpt", "batch", "GiB", "lacks", "a step"]
    left, right = ("left",) * 4, ("right",) * 4
    table = tabulate(rows, heads, colalign=(*left, *right), disable_numparse=True)
    in_parts = any(row[3].endswith("*") for row in rows)
    return f"{table}\n* and the loss in parts" if in_parts else table


def _is_same(recipe: Recipe, other: Recipe) -> bool:
    """Whether two recipes agree, given the same model: not every config can be compared."""
    return vars(recipe) | {"model": None} == vars(other) | {"model": None}


def _change(switch: Switch) -> list[str]:
    """The table row of a switch."""
    time = "unknown"
    if switch.seconds is not None:
        longer = "longer" if switch.seconds >= 0 else "shorter"
        same = abs(switch.seconds) < NO_TIME
        time = "as long" if same else f"{seconds_text(abs(switch.seconds))} {longer}"
    saved = round(switch.saved / GiB, 1) + 0.0  # no negative zero
    return [switch.name, f"{saved:,.1f}", time, "yes" if switch.fits else "no"]
