"""Traces of recipes: recorded at chosen sizes, checked against a run, then asked for any size.

Which events happen depends on sizes in a few places only, which `Circumstances` names; within them
one trace holds for all sizes. Each is checked when it is recorded, against a run at other sizes,
event by event. Where they differ, as where a model loops over the chunks of a sequence, each size
is run when it is asked for.
"""

from __future__ import annotations

import functools
import json
import math
from bisect import bisect
from dataclasses import replace
from typing import NamedTuple

import torch

from memlab import models
from memlab.card.bitsandbytes import fuses_4bit_product
from memlab.gpus import GPU
from memlab.quantized import COMPUTE_DTYPES
from memlab.recipe import Recipe
from memlab.simulation import (
    completed,
    full_log,
    log_of,
    only_new_garbage,
    peak_reserved_of,
    shallow_log,
)
from memlab.trace.depth import log_at_full_depth
from memlab.trace.events import Birth
from memlab.trace.log import Log
from memlab.trace.symbols import ALIGNED, chosen_sizes
from memlab.trace.trace import Trace
from memlab.training import import_libraries

# Of adapters at the chosen sizes; what is narrower than the second, a router, has none.
LARGEST_RANK, NARROW = 512, 32
# Lengths of the run that checks, by alignment, and its sequences unless there is one.
CHECKED = {16: 256, 8: 88, 4: 84, 2: 82, 1: 81}
CHECKED_BATCH = 2
SIZES = ("batch_size", "seq_len", "accumulation")
FEW_TOKENS = 1536  # bitsandbytes' own limit of fused products with 4-bit weights


class Circumstances(NamedTuple):
    """What of a recipe's sizes decides which events happen, and not only how large they are.

    one_sequence: with one of them dimensions can be swapped without a copy. alignment: the greatest
    common divisor of the length and 16, because kernels pad masks. inside: whether the length is
    within the window of attention. accumulation: micro-batches whose events differ; the first makes
    gradients, the second adds to them, and the last of several ranks reduces them.
    """

    one_sequence: bool
    alignment: int
    inside: bool
    accumulation: int

    @classmethod
    def of(cls, recipe: Recipe) -> Circumstances:
        """Those of a recipe."""
        window = getattr(models.config(recipe.model), "sliding_window", None)
        return cls(
            recipe.batch_size == 1,
            math.gcd(recipe.seq_len, ALIGNED),
            window is None or recipe.seq_len <= window,
            min(recipe.accumulation, 2 if recipe.ranks == 1 else 3),
        )


class Traces:
    """The logs of a recipe on a card for all micro-batches, lengths and numbers of micro-batches.

    run: as in `memlab.trace.depth.log_at_full_depth`.
    """

    def __init__(self, recipe: Recipe, card: GPU, run=map):
        self._recipe, self._card, self._run = recipe, card, run
        self._traces: dict[Circumstances, Trace | None] = {}
        self._logs: dict[tuple[int, int, int], Log] = {}  # of runs, by their sizes
        self._needed: dict[tuple[int, int, int], int] = {}  # bytes
        self.longest = models.max_length(recipe.model)  # tokens, None for no end

    def at(self, recipe: Recipe) -> Log:
        """The log of the recipe, at its sizes."""
        trace = self.trace(recipe)
        if trace is not None:
            return completed(recipe, trace.at(sizes_of(recipe), recipe.accumulation))
        sizes = tuple(getattr(recipe, name) for name in SIZES)
        if sizes not in self._logs:
            self._logs[sizes] = full_log(recipe, self._card, run=self._run)
        return self._logs[sizes]

    def is_served(self, recipe: Recipe, card: GPU) -> bool:
        """Whether a card's allocator can serve a size."""
        return peak_reserved_of(recipe, self.at(recipe), card) is not None

    def least(self, recipe: Recipe) -> int:
        """About the bytes that a size needs: where to look first.

        No more than it needs by a trace; where each size is a run, by a line through the two runs
        that are nearest, of as many sequences or of the same length.
        """
        trace = self.trace(recipe)
        if trace is not None:
            return trace.least(sizes_of(recipe), recipe.accumulation)
        runs = self._runs_like(recipe)
        if len(runs) < 2:
            self._run_two(recipe)
            runs = self._runs_like(recipe)
        tokens = recipe.batch_size * recipe.seq_len
        above = min(max(1, bisect(runs, (tokens,))), len(runs) - 1)
        (few, first), (many, second) = runs[above - 1 : above + 1]
        return int(first + (second - first) * (tokens - few) / (many - few))

    def _runs_like(self, recipe: Recipe) -> list[tuple[int, int]]:
        """(tokens, bytes) of the runs that differ from a recipe in one size at most, in order."""
        for sizes in self._logs.keys() - self._needed.keys():
            one = replace(self._recipe, **dict(zip(SIZES, sizes, strict=True)))
            card = self._card.without_limit()
            self._needed[sizes] = peak_reserved_of(one, self._logs[sizes], card)
        return sorted(
            (batch * length, needed)
            for (batch, length, times), needed in self._needed.items()
            if times == recipe.accumulation
            and (batch == recipe.batch_size or length == recipe.seq_len)
        )

    def _run_two(self, recipe: Recipe) -> None:
        """Run the first recipe, and one twice or half as large in the size in question."""
        first = replace(self._recipe, accumulation=recipe.accumulation)
        name = "batch_size" if recipe.seq_len == first.seq_len else "seq_len"
        size = 2 * getattr(first, name)
        if name == "seq_len" and self.longest is not None and size > self.longest:
            size //= 4
        for one in (first, first.but(**{name: max(1, size)})):
            self.at(one)

    def trace(self, recipe: Recipe) -> Trace | None:
        """The trace that holds for the recipe's sizes, None where none does."""
        if has_fused_products(recipe, self._card):
            return None
        around = Circumstances.of(recipe)
        if around not in self._traces:
            with only_new_garbage():
                self._traces[around] = record(recipe, self._card, self._run)
        return self._traces[around]


def record(recipe: Recipe, card: GPU, run=map) -> Trace | None:
    """The trace of a recipe for all sizes under its circumstances; None where no trace is theirs.

    run: as in `memlab.trace.depth.log_at_full_depth`.
    """
    try:
        return _recorded(recipe, card, run)
    except ValueError:
        return None  # a run of the recipe's own sizes says what is wrong with them


def _recorded(recipe: Recipe, card: GPU, run) -> Trace | None:
    around = Circumstances.of(recipe)
    import_libraries(recipe)
    sizes = _sizes(recipe, around)
    primed, check = at_sizes(recipe, around, sizes), _to_check(recipe, around)
    shallow: dict[int, Log] = {}

    def kept(function, recipes) -> list[Log]:
        recipes = list(recipes)
        logs = list(run(function, recipes))
        for of, log in zip(recipes, logs, strict=True):
            shallow[models.config(of.model).num_hidden_layers] = log
        return logs

    log = log_at_full_depth(primed, functools.partial(shallow_log, gpu=card), kept)
    if log is None:
        log = log_of(primed, gpu=card, numbered=True)
        checked, run_of_it = log, log_of(check, gpu=card, numbered=True)
    else:
        layers = min(shallow)
        short = replace(check, model=models.with_layers(check.model, layers))
        checked, run_of_it = shallow[layers], log_of(short, gpu=card)
    trace = Trace(checked, sizes, around.accumulation)
    if not are_alike(trace.at(sizes_of(check), check.accumulation), run_of_it):
        return None
    return Trace(log, sizes, around.accumulation)


def are_alike(one: Log, other: Log) -> bool:
    """Whether two logs have the same events with the same bytes, and the same weights."""
    if one.weights != other.weights or len(one.steps) != len(other.steps):
        return False
    for (name, step), (number, known) in zip(one.events(), other.events(), strict=True):
        if name != number or type(step) is not type(known):
            return False
        if type(step) is Birth and step != known:
            return False
    return True


def sizes_of(recipe: Recipe) -> dict[str, int]:
    """The values of the symbols in a recipe, as far as its model has them."""
    config = models.config(recipe.model)
    sizes = {
        "b": recipe.batch_size,
        "s": recipe.seq_len,
        "r": recipe.lora_rank,
        "P": getattr(config, "max_position_embeddings", None),
        "w": getattr(config, "sliding_window", None),
    }
    return {name: value for name, value in sizes.items() if value}


def at_sizes(recipe: Recipe, around: Circumstances, sizes: dict[str, int]) -> Recipe:
    """The recipe at chosen sizes; a model that is too short for them is made longer."""
    config, values = models.config(recipe.model), {}
    for name, symbol in (("max_position_embeddings", "P"), ("sliding_window", "w")):
        if getattr(config, name, None):
            values[name] = sizes[symbol]
    changes = {"batch_size": sizes["b"], "seq_len": sizes["s"], "accumulation": around.accumulation}
    if recipe.lora_rank:
        changes["lora_rank"] = sizes["r"]
    return replace(recipe, model=models.resized(config, **values), **changes)


def _sizes(recipe: Recipe, around: Circumstances) -> dict[str, int]:
    shapes, config = shapes_of(recipe), models.with_layers(recipe.model, 2)
    own = {size for shape in shapes for size in shape}
    own |= {value for value in vars(config).values() if type(value) is int}
    widths = [min(shape) for shape in shapes if len(shape) == 2 and min(shape) >= NARROW]
    rank = min([LARGEST_RANK, *widths]) if recipe.lora_rank else None
    return chosen_sizes(
        own,
        one_sequence=around.one_sequence,
        alignment=around.alignment,
        inside=around.inside,
        rank=rank,
    )


def shapes_of(recipe: Recipe) -> frozenset[tuple[int, ...]]:
    """The shapes of a model's weights."""
    return _shapes(models.with_layers(recipe.model, 2).to_json_string(), recipe.task)


@functools.lru_cache(maxsize=64)
def _shapes(config: str, task: str) -> frozenset[tuple[int, ...]]:
    with torch.device("meta"):
        model = models.build(json.loads(config), task)
    return frozenset(tuple(weight.shape) for weight in model.parameters())


def has_fused_products(recipe: Recipe, card: GPU) -> bool:
    """Whether bitsandbytes multiplies so few tokens with a 4-bit weight without writing it out.

    Which weights of which shapes at how many tokens is a table of its own.
    """
    if recipe.base not in ("nf4", "fp4"):
        return False
    dtype = COMPUTE_DTYPES[recipe.compute_dtype]
    tokens = recipe.batch_size * recipe.seq_len
    return any(
        fuses_4bit_product(card, dtype, tokens, *shape)
        for shape in shapes_of(recipe)
        if len(shape) == 2
    )


def _to_check(recipe: Recipe, around: Circumstances) -> Recipe:
    """The recipe at the sizes of the run that checks. Raises ValueError where it allows none."""
    length = CHECKED[around.alignment] + FEW_TOKENS * (recipe.base in ("nf4", "fp4"))
    window = getattr(models.config(recipe.model), "sliding_window", None)
    if window and not around.inside:
        length += -(-window // ALIGNED) * ALIGNED
    elif window and length > window:
        raise ValueError(f"no length of the check is within a window of {window}")
    batch = 1 if around.one_sequence else CHECKED_BATCH
    return replace(recipe, batch_size=batch, seq_len=length, accumulation=around.accumulation)
