"""Does a training fit a card, and how large may it be?

The prediction, and the margin that its known error asks for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from memlab import models
from memlab.fields import fraction, one_of
from memlab.footprint import Footprint
from memlab.gpus import GPU, GPUS, find_gpu
from memlab.predict.recipe_log import require_recipe
from memlab.predict.simulate import (
    footprint_from_log,
    full_log,
    peak_allocated_of,
    peak_reserved_of,
    sized_log,
)
from memlab.spec.recipe import Recipe
from memlab.trace.log import Log
from memlab.units import MiB, in_unit_of

if TYPE_CHECKING:
    from memlab.predict.serving import ServingFootprint
    from memlab.spec.serving import Serving, Workload

# The prediction is trusted to so much of what it says ...
MARGIN = 0.05
# ... and a context to so many bytes: those of two programs on the same kind of card differ by up
# to that (memlab/gpus.py).
CONTEXT_MARGIN = 100 * MiB


@dataclass(frozen=True)
class Fit:
    """The answer of `fits`, in bytes.

    needed: of the card's memory, context included. margin: kept free beside it.
    footprint: what `memlab.simulate` gives, a `ServingFootprint` of a serving.
    """

    fits: bool
    needed: int
    margin: int
    total_memory: int
    footprint: Footprint | ServingFootprint

    def __bool__(self) -> bool:
        return self.fits

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        needed, margin, total = (
            in_unit_of(n, self.total_memory) for n in (self.needed, self.margin, self.total_memory)
        )
        return (
            f"{verdict}: {needed}, and {margin} kept free for the error of the "
            f"prediction; the card has {total}"
        )


def fits(recipe: Recipe | Serving, gpu: GPU | str | int, margin: float = MARGIN) -> Fit:
    """Whether `recipe` trains on a card, by a simulated step and a margin for its error.

    A `memlab.Serving` in place of the recipe: whether its text is written there.

    gpu: a name of `memlab.gpus.GPUS` or a number of bytes. margin: the share of the predicted
    bytes that is kept free, beside 100 MiB for what a program's context may have more.

    On 61 LoRA trainings that others measured on a T4 (`memlab.evidence`), peak allocated is
    simulated to 0.5 % and, without a quantized base, peak reserved to 0.3 %. Runs that others
    measured of full fine-tuning, autocast, PEFT's methods and torchtune's techniques, on a T4, an
    L40S and an A100, are simulated to 2 %, but for some that the book's page on accuracy explains.
    The default keeps 5 %, which is also the most that this package allows its prediction to fall
    short of a recorded run. It is meant for today's kernels: the nine published runs of January
    2022 used up to 16 % more than today's kernels are predicted to, and software of that age needs
    `margin=0.2`.

    What passes the card only by blocks that the allocator could give back is tried again on a
    card smaller by the margin, where it does give them back.

    A quantized base comes weight by weight, as today's transformers loads it. The first releases of
    transformers 5 (until March 2026) loaded by threads, and are not what this answers for: they can
    run out of memory while they load, and published trainings with them took up to 14 % more.

    Raises ValueError for an unknown card, a margin that is no share from 0 to below 1, and a number
    format that the card does not have.
    """
    card = limited(gpu, margin)
    return fit_from_log(recipe, full_log(recipe, card), card, margin)


def fit_from_log(
    recipe: Workload,
    log: Log,
    card: GPU,
    margin: float = MARGIN,
    link: str | None = None,
) -> Fit:
    """The answer of `fits` for a log that is there already, on a card with a limit.

    link: between ranks, as in `simulate`.
    """
    answer = verdict(recipe, log, card, margin)
    footprint = footprint_from_log(recipe, log, answer.card, link)
    assert card.total_memory is not None  # it has a limit
    return Fit(answer.fits, answer.needed, answer.margin, card.total_memory, footprint)


class Verdict(NamedTuple):
    """What `Fit` says, without a footprint, which takes as long again.

    card: whose allocator serves it: one without a limit, or one smaller by the margin.
    """

    fits: bool
    needed: int
    margin: int
    card: GPU


def verdict(recipe: Workload, log: Log, card: GPU, margin: float = MARGIN) -> Verdict:
    """Whether a log fits a card with a limit."""
    return verdict_by(lambda by: peak_reserved_of(recipe, log, by), card, margin)


def verdict_by(peak_on: Callable[[GPU], int | None], card: GPU, margin: float = MARGIN) -> Verdict:
    """Whether what reserves `peak_on` a card fits one with a limit.

    peak_on: bytes on a card without a limit, and on one smaller by the margin, where None says that
        it runs out of memory.
    """
    context, by, most = _context(card), card.without_limit(), room(card, margin)
    peak = peak_on(by)
    assert peak is not None  # where nothing ends, nothing is refused
    fits = peak + context <= most
    if not fits:
        smaller = dataclasses.replace(card, total_memory=most)
        tight = peak_on(smaller)
        if tight is not None:
            fits, peak, by = True, tight, smaller
    needed = peak + context
    return Verdict(fits, needed, int(margin * needed) + _context_margin(card), by)


def room(card: GPU, margin: float = MARGIN) -> int:
    """Bytes of a card, context included, that a training may be predicted to need."""
    assert card.total_memory is not None  # it has a limit
    return math.ceil((card.total_memory - _context_margin(card)) / (1 + margin))


def _context_margin(card: GPU) -> int:
    return CONTEXT_MARGIN * (_context(card) > 0)


def _context(card: GPU) -> int:
    assert card.context is not None  # that of a card with a limit is known
    return card.context


def limited(gpu: GPU | str | int | None, margin: float) -> GPU:
    """The card that is named, which must have a limit."""
    fraction("margin", margin)
    card = find_gpu(gpu)
    if card.total_memory is None:
        raise ValueError(f"gpu is {gpu!r}: allowed are {', '.join(GPUS)}, or a number of bytes")
    return card


# What `largest` can look for, and its steps; a recipe has a `seq_len`, a serving a `prompt`.
STEPS = {"batch_size": 1, "seq_len": 64, "prompt": 64}
MOST = 2**16  # sequences or tokens where nothing else ends the search


@dataclass(frozen=True)
class Largest:
    """The largest size with which a recipe fits a card.

    field: of the recipe. value: the largest, 0 where not even the smallest fits. recipe: with that
    value, or the smallest; fit: what `fits` says of it. next: the next larger value, which does not
    fit, or None where the search ends before one does not; why: why it ends there, else empty.
    """

    field: str
    value: int
    recipe: Recipe | Serving
    fit: Fit
    next: int | None
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        asked = {"field": self.field, "value": self.value, "next": self.next, "why": self.why}
        return asked | {"needed": self.fit.needed, "margin": self.fit.margin}

    def __str__(self) -> str:
        if not self.value:
            return f"not even {self.field}={getattr(self.recipe, self.field)}: {self.fit}"
        end = self.why or f"{self.next} does not fit"
        return f"largest {self.field}: {self.value} ({end})\n{self.fit}"


def largest(
    recipe: Recipe | Serving,
    gpu: GPU | str | int,
    field: str = "batch_size",
    margin: float = MARGIN,
) -> Largest:
    """The largest micro-batch, or the longest sequence, with which `recipe` fits a card.

    field: `batch_size`, or `seq_len` in steps of 64 tokens and at the recipe's own length; of a
    `memlab.Serving` in place of the recipe `prompt`, likewise, which with its new tokens is the
    longest context. margin: as in `fits`.

    One trace of a recipe gives the log of every size (`memlab.predict.traces`), and the card's
    allocator serves those in question. A serving is simulated at each, and so is what has no trace
    for all sizes, such as a loss in parts: that takes up to some minutes. The value fits, the next
    one does not.

    Raises ValueError as `fits` does, and for another field.
    """
    require_recipe(recipe)
    one_of("field", field, [name for name in STEPS if hasattr(recipe, name)])
    card = limited(gpu, margin)
    value, following = largest_size(recipe, card, field, margin)
    least = min(STEPS[field], following or value)
    sized = recipe.but(**{field: value or least})
    fit = fit_from_log(sized, sized_log(sized, card), card, margin)
    why = "" if following else why_no_larger(recipe, field)
    return Largest(field, value, sized, fit, following, why)


def why_no_larger(recipe: Workload, field: str) -> str:
    """Why a search for the largest size ends where everything fits."""
    if field == "batch_size" or models.max_length(recipe.model) is None:
        return f"the search ends at {MOST:,}"
    return f"{recipe.model_name} allows no larger ones"


def largest_size(
    recipe: Workload,
    card: GPU,
    field: str,
    margin: float = MARGIN,
    own_fits: bool | None = None,
    log_of: Callable[..., Log] = sized_log,
    peak_of: Callable[..., int] = peak_allocated_of,
) -> tuple[int, int | None]:
    """(the largest value that fits or 0, the next one or None), as in `largest`.

    Where the recipe's own value fits, so does the answer, which is no smaller: it is that value
    where no larger multiple of the step fits. A longer sequence can reserve fewer bytes, so between
    smaller ones that do not fit there may be larger that do.
    own_fits: whether it does, None where that is to be found. log_of, peak_of: what a size does to
    memory, and its peak, as `memlab.predict.simulate` gives them.
    """
    most_bytes = room(card, margin)
    smaller = dataclasses.replace(card, total_memory=most_bytes)
    longest = None if field == "batch_size" else models.max_length(recipe.model)
    end = longest - getattr(recipe, "new_tokens", 0) if longest else MOST
    step = min(STEPS[field], end)

    def size_of(steps: int) -> int:
        return min(steps * step, end)

    def sized(steps: int) -> Workload:
        return recipe.but(**{field: size_of(steps)})

    def tensors(steps: int) -> int:
        return peak_of(sized(steps), card)

    def serves(sized_recipe: Workload) -> bool:
        log = log_of(sized_recipe, card)
        return peak_reserved_of(sized_recipe, log, smaller) is not None

    def fits(steps: int) -> bool:
        return serves(sized(steps))

    every, own = -(-end // step), getattr(recipe, field)
    first = min(max(1, own // step), every)
    most = _last_by_line(tensors, first, every, most_bytes - _context(card))
    off_grid = own != size_of(first)  # a length that is no multiple of the step, or below the first
    if own_fits is None and (first < most or off_grid):
        own_fits = serves(recipe)
    least = first if off_grid and first < most and not own_fits and fits(first) else 0
    if own_fits:
        least = every if own == end else own // step
    steps = _last(fits, max(most, least), least)
    size = max(size_of(steps), own) if own_fits else size_of(steps)
    return size, None if steps == every else size_of(steps + 1)


def _last(fits: Callable[[int], bool], most: int, least: int) -> int:
    """A number up to `most` that fits while the next does not, near `most`; at least `least`."""
    fitting, over, stride = most, most + 1, 1
    while fitting > least and not fits(fitting):
        over, fitting = fitting, max(least, fitting - stride)
        stride *= 2
    while over - fitting > 1:
        middle = (fitting + over) // 2
        if fits(middle):
            fitting = middle
        else:
            over = middle
    return fitting


def _last_by_line(needed: Callable[[int], int], first: int, end: int, usable: int) -> int:
    """The largest number up to `end` that needs at most `usable`, of which more need more; else 0.

    What to try next, after `first` and its double, lies on the line through the last two tries.
    """
    tries: list[tuple[int, int]] = []
    fitting, over, trial = 0, end + 1, first
    while over - fitting > 1:
        if not fitting < trial < over:
            # Beside what is known, by the line; in the middle where lines have led nowhere.
            near = fitting + 1 if trial <= fitting else over - 1
            trial = near if len(tries) < 8 else (fitting + over) // 2
        tries.append((trial, needed(trial)))
        if tries[-1][1] <= usable:
            fitting = trial
        else:
            over = trial
        trial = 2 * first
        if len(tries) > 1:
            (previous, low), (latest, high) = tries[-2:]
            trial = previous + (latest - previous) * (usable - low) // ((high - low) or 1)
    return fitting
