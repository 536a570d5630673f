"""The memory of a recipe's step on a card that need not be there."""

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
    """The memory of one optimizer step of `recipe` on a GPU that need not be there.

    gpu: a name of `memlab.gpus.GPUS`, a number of bytes, or None for a card without a limit.
    link: between several ranks, as `SimulatedGPU` has it.

    Two steps run; the second is counted, because optimizer states appear in the first. Of a model
    with many layers a trace is kept, that `memlab.predict.traces` records with a few of them.

    A quantized base comes to the card as today's `from_pretrained` loads it, or one layer after the
    other where ranks split it. A model that is moved whole, or loaded by threads, as by the first
    releases of transformers 5, leaves other free blocks behind and reserves other bytes.

    A `memlab.Serving` in place of the recipe gives a `ServingFootprint`: inference,
    with the peaks of prefill and decode apart.

    Raises torch.OutOfMemoryError in PyTorch's own words when the card is too small, and ValueError
    when it does not have the recipe's number format.
    """
    card = find_gpu(gpu)
    if link is not None:
        link_rate(card, link)  # or refuses
    return footprint_from_log(recipe, full_log(recipe, card), card, link)


def full_log(recipe: Workload, card: GPU, loop: Loop | None = None) -> Log:
    """What two steps of `recipe` do to memory on a card of this kind, whatever its size.

    loop: another training loop than memlab's own, a function like `memlab.predict.run.two_steps`.
    """
    refuse_format(recipe, card)
    if loop or not is_deep(recipe):
        from memlab.predict.trace_recorder import run_log  # it brings PyTorch

        return run_log(recipe, card, loop)
    return traces().log(recipe, card)


def sized_log(recipe: Workload, card: GPU) -> Log:
    """As `full_log`, where other sizes of the same recipe are to be asked for, too."""
    refuse_format(recipe, card)
    return traces().log(recipe, card)


def peak_allocated_of(recipe: Workload, card: GPU) -> int:
    """The most bytes of blocks in the measured step of `sized_log`, often without that log."""
    refuse_format(recipe, card)
    return traces().peak_allocated(recipe, card)


def footprint_from_log(
    recipe: Workload, log: Log, card: GPU, link: str | None = None
) -> Footprint | ServingFootprint:
    """What `simulate` answers, of a log that is there already."""
    footprint = serve(recipe, log, card, link)
    if isinstance(recipe, Recipe):
        return footprint
    from memlab.predict.serving import serving_footprint  # it brings transformers' caches

    return serving_footprint(recipe, log, footprint, card)


def serve(recipe: Workload, log: Log, card: GPU, link: str | None = None) -> Footprint:
    """The footprint of a recipe's log, served by this card's allocator."""
    ledger = Ledger(CardMemory(card, False, recipe.expandable_segments))
    replay(_events(recipe, log, card), ledger)
    samples = recipe.batch_size * recipe.accumulation
    return card_footprint(ledger, log.work, log, samples, link)


def peak_reserved_of(recipe: Workload, log: Log, card: GPU) -> int | None:
    """The peak reserved that `serve` finds, in half the time; None where it runs out of memory."""
    allocator = CachingAllocator(card.usable, False, recipe.expandable_segments, card.total_memory)
    return peak_reserved(_events(recipe, log, card), allocator)


def _events(recipe: Workload, log: Log, card: GPU) -> Iterable[Event]:
    """Those of a log; before them, where `from_pretrained` loads a base, its warm-up block.

    The block's size depends on the card and on the depth of the model, so that no log has it.
    """
    in_shards = isinstance(recipe, Recipe) and is_moved_by_sharding(recipe)
    if recipe.base not in QUANTIZED or in_shards:
        return log.events()
    nbytes = warm_up_bytes(recipe, card.total_memory)
    block = Alloc(nbytes, Category.TEMPORARY, Phase.FORWARD, OUTSIDE, "aten.empty")
    warm_up = ("warm-up", block), ("warm-up", Free(block, block.phase, 0))
    return itertools.chain(warm_up if nbytes else (), log.events())
