"""Does a training fit a card? The prediction, and the margin that its known error asks for."""

import dataclasses
from dataclasses import dataclass

import torch

from memlab.footprint import Footprint
from memlab.gpus import GPU, GPUS, find_gpu
from memlab.recipe import Recipe
from memlab.simulation import full_log, serve
from memlab.units import MiB, mib

# The prediction is trusted to so much of what it says ...
MARGIN = 0.05
# ... and a context to so many bytes: those of two programs on the same kind of card differ by up
# to that (memlab/gpus.py).
CONTEXT_MARGIN = 100 * MiB


@dataclass(frozen=True)
class Fit:
    """The answer of `fits`, in bytes.

    needed: of the card's memory, context included; with a quantized base the most that a way of
    loading it asks for, unless it fits in another way only. margin: kept free beside it.
    footprint: the simulated step.
    """

    fits: bool
    needed: int
    margin: int
    total_memory: int
    footprint: Footprint

    def __bool__(self) -> bool:
        return self.fits

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"{verdict}: {mib(self.needed)} and a margin of {mib(self.margin)}, "
            f"the card has {mib(self.total_memory)}"
        )


def fits(recipe: Recipe, gpu: GPU | str | int, margin: float = MARGIN) -> Fit:
    """Whether `recipe` trains on a card, by a simulated step and a margin for its error.

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

    A quantized base leaves more or less in the allocator's cache, by the way it is loaded:
    counted is the upper end of `Footprint.reserved_range`.

    What passes the card only by blocks that the allocator could give back is tried again on a
    card smaller by the margin, where it does give them back. There a base comes weight by weight,
    as today's transformers loads it; its first releases with threads (5.0, until March 2026) can
    run out of memory while they load, and are not what this answers for.

    Raises ValueError for an unknown card, a margin below 0, and a number format that the card
    does not have.
    """
    if not margin >= 0:
        raise ValueError(f"margin is {margin!r}: allowed are numbers from 0")
    card = find_gpu(gpu)
    if card.total_memory is None:
        raise ValueError(f"gpu is {gpu!r}: allowed are {', '.join(GPUS)}, or a number of bytes")
    log = full_log(recipe, card)
    footprint = serve(recipe, log, card.without_limit())
    _, most = footprint.reserved_range or (None, footprint.peak_reserved)
    context = card.total_memory - card.usable
    needed = most + context
    kept = int(margin * needed) + CONTEXT_MARGIN * (context > 0)
    total = card.total_memory
    fit = Fit(needed + kept <= total, needed, kept, total, footprint)
    least = footprint.peak_allocated + context
    if fit or least + kept > total:
        return fit
    try:
        tight = serve(recipe, log, dataclasses.replace(card, total_memory=total - kept))
    except torch.OutOfMemoryError:
        return fit
    return Fit(True, tight.device_used, kept, total, tight)
