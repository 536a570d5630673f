"""Whether a workload fits a GPU, and the largest size at which it does.

Both answers replay the log of a simulated run through the GPU's caching allocator. They keep a
margin free for the known error of the prediction. The search for the largest size first bounds it
by allocated bytes, which are cheap to compute. It then decides by what the allocator reserves.
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

MARGIN = 0.05  # share of the predicted bytes that is kept free for the error of the prediction
# Bytes kept free for the CUDA context: contexts of two programs on the same kind of GPU differ by
# up to this much (memlab/gpus.py).
CONTEXT_MARGIN = 100 * MiB


@dataclass(frozen=True)
class Fit:
    """The answer of `fits`. Sizes are in bytes.

    fits: whether the workload fits.
    needed: bytes of the GPU's memory that it takes, CUDA context included.
    margin: bytes that are kept free in addition.
    total_memory: the GPU's memory.
    footprint: the result of `memlab.simulate`; a `ServingFootprint` for a serving.
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
    """Whether `recipe` fits a GPU, by a simulated step and a margin for the prediction's error.

    For a `memlab.Serving` in place of the recipe, whether the GPU has room to generate its text.

    gpu: a name of `memlab.gpus.GPUS` or a number of bytes.
    margin: the share of the predicted bytes that is kept free. On a named GPU another 100 MiB are
        kept free, because a program's CUDA context may be larger than the assumed one.

    Known error: 61 LoRA trainings that other people measured on a T4 are on record
    (`memlab.evidence`). Their peak allocated is simulated to within 0.5 %. Their peak reserved is
    simulated to within 0.3 %, except with a quantized base. Other published runs cover full
    fine-tuning, autocast, PEFT's methods and torchtune's techniques, on a T4, an L40S and an A100.
    They are simulated to within 2 %, apart from a few that the book's page on accuracy explains.

    The default margin is 5 %, which is also the most that this package allows its prediction to
    fall short of a recorded run. It assumes today's kernels. The nine published runs of January
    2022 used up to 16 % more than is predicted for today's kernels. Software of that age needs
    `margin=0.2`.

    The caching allocator returns cached blocks to the device before it reports out of memory. A
    recipe that reserves too much on a GPU without a limit is therefore replayed a second time. The
    second replay runs on a GPU smaller by the margin, where the allocator does return them.

    A quantized base is loaded one weight at a time, as today's transformers does. The first
    releases of transformers 5 (until March 2026) loaded with threads and are not covered. They can
    run out of memory while loading, and published trainings with them took up to 14 % more.

    Raises ValueError for an unknown GPU, for a margin outside [0, 1), and for a number format that
    the GPU does not have.
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
    """The answer of `fits` for a log that has been made already, on a GPU with a limit.

    link: the link between ranks, as in `simulate`.
    """
    answer = verdict(recipe, log, card, margin)
    footprint = footprint_from_log(recipe, log, answer.card, link)
    assert card.total_memory is not None  # it has a limit
    return Fit(answer.fits, answer.needed, answer.margin, card.total_memory, footprint)


class Verdict(NamedTuple):
    """A `Fit` without its footprint, which would take as long again to compute.

    card: the GPU on which the log was replayed, without a limit or smaller by the margin.
    """

    fits: bool
    needed: int
    margin: int
    card: GPU


def verdict(recipe: Workload, log: Log, card: GPU, margin: float = MARGIN) -> Verdict:
    """Whether a log fits a GPU with a limit."""
    return verdict_by(lambda by: peak_reserved_of(recipe, log, by), card, margin)


def verdict_by(peak_on: Callable[[GPU], int | None], card: GPU, margin: float = MARGIN) -> Verdict:
    """Whether a workload fits a GPU with a limit, by the peak that it reserves.

    peak_on: returns the peak reserved bytes on a given GPU, or None if memory runs out there. It is
        asked about the GPU without a limit, then perhaps about one smaller by the margin.
    """
    context, by, most = _context(card), card.without_limit(), room(card, margin)
    peak = peak_on(by)
    assert peak is not None  # without a limit, no allocation fails
    fits = peak + context <= most
    if not fits:
        # Part of the peak may be cached blocks. The allocator releases them before it fails, but
        # only when it reaches a limit (c10/cuda/CUDACachingAllocator.cpp, `malloc` calls
        # `release_cached_blocks` and retries). So replay again with the limit of the margin.
        smaller = dataclasses.replace(card, total_memory=most)
        tight = peak_on(smaller)
        if tight is not None:
            fits, peak, by = True, tight, smaller
    needed = peak + context
    return Verdict(fits, needed, int(margin * needed) + _context_margin(card), by)


def room(card: GPU, margin: float = MARGIN) -> int:
    """Bytes of a GPU, context included, that the prediction may reach if the margin is to be kept.

    The margin is a share of the predicted bytes, not of the GPU's.
    """
    assert card.total_memory is not None  # it has a limit
    return math.ceil((card.total_memory - _context_margin(card)) / (1 + margin))


def _context_margin(card: GPU) -> int:
    # A GPU given as a number of bytes has no context: the bytes are all the allocator's.
    return CONTEXT_MARGIN * (_context(card) > 0)


def _context(card: GPU) -> int:
    assert card.context is not None  # known for every GPU with a limit
    return card.context


def limited(gpu: GPU | str | int | None, margin: float) -> GPU:
    """The GPU that `gpu` names. Raises ValueError if it has no limit, or for a bad margin."""
    fraction("margin", margin)
    card = find_gpu(gpu)
    if card.total_memory is None:
        raise ValueError(f"gpu is {gpu!r}: allowed are {', '.join(GPUS)}, or a number of bytes")
    return card


# Field that `largest` can search -> step of the search, in sequences or tokens. A recipe has
# `seq_len`, a serving has `prompt`.
STEPS = {"batch_size": 1, "seq_len": 64, "prompt": 64}
MOST = 2**16  # sequences or tokens at which the search ends if the model sets no limit


@dataclass(frozen=True)
class Largest:
    """The largest size at which a recipe fits a GPU.

    field: the recipe's field that was searched.
    value: the largest value that fits; 0 if not even the smallest fits.
    recipe: the recipe with that value, or with the smallest one if none fits.
    fit: the answer of `fits` for that recipe.
    next: the next larger value, which does not fit; None if the search ended with all values
        fitting.
    why: why the search ended there; empty if `next` does not fit.
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
    """The largest micro-batch, or the longest sequence, with which `recipe` fits a GPU.

    field: `batch_size`, or `seq_len` in steps of 64 tokens and at the recipe's own length. For a
        `memlab.Serving` in place of the recipe `prompt`, in the same steps; the longest context is
        the prompt plus the new tokens.
    margin: as in `fits`.

    The value fits and the next one does not. One trace of a recipe gives the log of every size
    (`memlab.predict.traces`), which the GPU's allocator then replays. Workloads without a trace for
    all sizes are simulated at each size, which can take some minutes. Servings and losses that are
    computed in parts are such workloads.

    Raises ValueError as `fits` does, and for another field.
    """
    require_recipe(recipe)
    one_of("field", field, [name for name in STEPS if hasattr(recipe, name)])
    card = limited(gpu, margin)
    value, following = largest_size(recipe, card, field, margin)
    # The smallest size that was searched, which is below a step if the model has few positions.
    least = min(STEPS[field], following or value)
    sized = recipe.but(**{field: value or least})
    fit = fit_from_log(sized, sized_log(sized, card), card, margin)
    why = "" if following else why_no_larger(recipe, field)
    return Largest(field, value, sized, fit, following, why)


def why_no_larger(recipe: Workload, field: str) -> str:
    """Why a search for the largest size ended although every value fits."""
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

    own_fits: whether the recipe's own value fits; None if that is not known.
    log_of, peak_of: return the log of a recipe and its peak allocated bytes, by default as
        `memlab.predict.simulate` does.

    If the recipe's own value fits, the answer is at least that value. It is that value itself if no
    larger multiple of the step fits.

    Known limitation: reserved bytes do not always grow with the size. The value fits and the next
    one does not, but an even larger one may fit again.
    """
    most_bytes = room(card, margin)
    smaller = dataclasses.replace(card, total_memory=most_bytes)
    longest = None if field == "batch_size" else models.max_length(recipe.model)
    end = longest - getattr(recipe, "new_tokens", 0) if longest else MOST
    step = min(STEPS[field], end)

    # The search runs over whole steps; the last step may be cut by the end of the range.
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

    every, own = -(-end // step), getattr(recipe, field)  # steps of the whole range; own value
    first = min(max(1, own // step), every)
    # No allocator reserves less than the tensors' own blocks, so no more steps than this can fit.
    # Allocated bytes grow with the size and take milliseconds each; a replay takes far longer.
    most = _last_by_line(tensors, first, every, most_bytes - _context(card))
    off_grid = own != size_of(first)  # a length that is no multiple of the step, or below the first
    # On the grid, `first == most` is the first trial below, and `first > most` cannot fit.
    if own_fits is None and (first < most or off_grid):
        own_fits = serves(recipe)
    # Lower end of the search, known to fit. Reserved bytes can fall as the length grows. The own
    # value may therefore fit although the multiple below it does not, and the reverse.
    least = first if off_grid and first < most and not own_fits and fits(first) else 0
    if own_fits:
        least = every if own == end else own // step
    steps = _last(fits, max(most, least), least)
    size = max(size_of(steps), own) if own_fits else size_of(steps)
    return size, None if steps == every else size_of(steps + 1)


def _last(fits: Callable[[int], bool], most: int, least: int) -> int:
    """A number from `least` to `most`, near `most`, that fits while the next one does not.

    `least` is taken to fit, and `most + 1` not to.
    """
    # `most` is a tight bound, so go down from it in doubling strides, then bisect the last stride.
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
    """The largest number up to `end` for which `needed` is at most `usable`; 0 if there is none.

    `needed` must not decrease. The secant method: each trial after `first` and its double lies on
    the line through the last two. Bytes are close to linear in the batch size, and smooth in the
    length.
    """
    tries: list[tuple[int, int]] = []
    fitting, over, trial = 0, end + 1, first
    while over - fitting > 1:
        if not fitting < trial < over:
            # The line points outside the open interval. Try its nearer end, which often settles the
            # search. After eight trials bisect, so that the search ends for any curve.
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
