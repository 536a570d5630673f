"""Simulate a recipe or a serving on a GPU that need not be present: `memlab.simulate`.

Two steps give the log of a workload: from a trace (`memlab.predict.traces`), or from a run on a
simulated GPU. The GPU's caching allocator then replays the log. The module imports no PyTorch, so
that an answer from a stored trace does not need it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, overload

from memlab.card.footprint import card_footprint
from memlab.card.links import link_rate
from memlab.footprint import Category, Footprint, Phase
from memlab.gpus import GPU, find_gpu
from memlab.predict.recipe_log import is_deep, refuse_format, warm_up_bytes
from memlab.predict.traces import traces
from memlab.spec.recipe import QUANTIZED, Recipe, is_moved_by_sharding
from memlab.trace.allocator import CachingAllocator
from memlab.trace.card_memory import CardMemory
from memlab.trace.events import OUTSIDE, Alloc, Free
from memlab.trace.ledger import Ledger
from memlab.trace.log import Event, Log, peak_reserved, replay

if TYPE_CHECKING:
    from memlab.predict.run import Loop
    from memlab.predict.serving import ServingFootprint
    from memlab.spec.serving import Serving, Workload


@overload
def simulate(
    recipe: Recipe, gpu: GPU | str | int | None = None, link: str | None = None
) -> Footprint: ...
@overload
def simulate(
    recipe: Serving, gpu: GPU | str | int | None = None, link: str | None = None
) -> ServingFootprint: ...
def simulate(
    recipe: Recipe | Serving, gpu: GPU | str | int | None = None, link: str | None = None
) -> Footprint | ServingFootprint:
    """The memory of one optimizer step of `recipe` on a GPU that need not be present.

    gpu: a name of `memlab.gpus.GPUS`, a number of bytes, or None for a GPU without a limit.
    link: the link between several ranks, as in `SimulatedGPU`.

    Two steps run. The second one is counted, because the first one allocates the optimizer states.
    For a model with many layers, `memlab.predict.traces` records a trace with a few of them and
    keeps it.

    A quantized base is loaded onto the GPU as today's `from_pretrained` does, or layer by layer if
    ranks split it. A model that is moved as a whole leaves other free blocks behind and reserves
    other bytes. So does one that threads load, as in the first releases of transformers 5.

    For a `memlab.Serving` in place of the recipe, returns a `ServingFootprint` of inference with
    separate peaks for prefill and decode.

    Raises torch.OutOfMemoryError, with PyTorch's message, if the GPU is too small. Raises
    ValueError if the GPU does not have the recipe's number format, or the link.
    """
    card = find_gpu(gpu)
    if link is not None:
        link_rate(card, link)  # raises ValueError before any work is done
    return footprint_from_log(recipe, full_log(recipe, card), card, link)


def full_log(recipe: Workload, card: GPU, loop: Loop | None = None) -> Log:
    """The log of two steps of `recipe` on this kind of GPU, whatever its memory.

    loop: a training loop to run instead of memlab's own, such as `memlab.predict.run.two_steps`.
    """
    refuse_format(recipe, card)
    # A trace has memlab's own loop in it, and pays off for deep models only.
    if loop or not is_deep(recipe):
        from memlab.predict.trace_recorder import run_log  # imports PyTorch

        return run_log(recipe, card, loop)
    return traces().log(recipe, card)


def sized_log(recipe: Workload, card: GPU) -> Log:
    """As `full_log`, for callers that ask about more sizes of the same recipe.

    A trace is recorded for shallow models, too, because it serves all sizes.
    """
    refuse_format(recipe, card)
    return traces().log(recipe, card)


def peak_allocated_of(recipe: Workload, card: GPU) -> int:
    """The peak of requested bytes, rounded up to blocks, in the measured step of `sized_log`.

    No allocator reserves less. If there is a trace, the log is not written out.
    """
    refuse_format(recipe, card)
    return traces().peak_allocated(recipe, card)


def footprint_from_log(
    recipe: Workload, log: Log, card: GPU, link: str | None = None
) -> Footprint | ServingFootprint:
    """The answer of `simulate` for a log that has been made already."""
    footprint = serve(recipe, log, card, link)
    if isinstance(recipe, Recipe):
        return footprint
    from memlab.predict.serving import serving_footprint  # imports transformers

    return serving_footprint(recipe, log, footprint, card)


def serve(recipe: Workload, log: Log, card: GPU, link: str | None = None) -> Footprint:
    """The footprint of a recipe's log, replayed through the GPU's caching allocator."""
    ledger = Ledger(CardMemory(card, False, recipe.expandable_segments))
    replay(_events(recipe, log, card), ledger)
    samples = recipe.batch_size * recipe.accumulation
    return card_footprint(ledger, log.work, log, samples, link)


def peak_reserved_of(recipe: Workload, log: Log, card: GPU) -> int | None:
    """The peak reserved bytes as `serve` finds them, in half the time; None if memory runs out."""
    allocator = CachingAllocator(card.usable, False, recipe.expandable_segments, card.total_memory)
    return peak_reserved(_events(recipe, log, card), allocator)


def _events(recipe: Workload, log: Log, card: GPU) -> Iterable[Event]:
    """The events of a log, after the warm-up block of `from_pretrained` if that loads a base.

    The size of that block depends on the GPU's memory and on the depth of the model, so it is not
    in the log.
    """
    in_shards = isinstance(recipe, Recipe) and is_moved_by_sharding(recipe)
    if recipe.base not in QUANTIZED or in_shards:
        return log.events()
    nbytes = warm_up_bytes(recipe, card.total_memory)
    block = Alloc(nbytes, Category.TEMPORARY, Phase.FORWARD, OUTSIDE, "aten.empty")
    # Allocated and freed at once: the cached segment then serves the weights.
    warm_up = ("warm-up", block), ("warm-up", Free(block, block.phase, 0))
    return itertools.chain(warm_up if nbytes else (), log.events())
