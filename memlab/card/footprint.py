"""The footprint of what ran on a card: its context and its seconds beside the tensors' bytes."""

from collections import Counter
from dataclasses import replace
from typing import Any

from memlab.card.step_time import step_time
from memlab.footprint import Footprint
from memlab.trace.ledger import Ledger
from memlab.trace.log import Log


def card_footprint(
    ledger: Ledger,
    work: Counter,
    log: Log | None = None,
    samples: int | None = None,
    link: str | None = None,
) -> Footprint:
    """The footprint of a ledger that a `CardMemory` serves, with the card's context.

    work: what the step's operators do (`memlab.trace.work.Work`) -> how often. log: what was
        replayed, with the number of parameters and its assumptions; None for a run. samples:
        sequences of the step. link: between ranks, as `memlab.card.links.link_rate` has it.
    """
    memory: Any = ledger.allocator
    gpu, footprint = memory.gpu, ledger.footprint()
    context = gpu.context
    seconds, no_time = None, "no operator has run on the card"
    if work:
        try:
            seconds, no_time = step_time(work, gpu, samples, link), ""
        except ValueError as error:
            no_time = str(error)
    return replace(
        footprint,
        step_time=seconds,
        no_time=no_time,
        parameters=log.parameters if log else None,
        trainable_parameters=log.trainable_parameters if log else None,
        context=context,
        assumptions=(*ledger.assumptions, *(log.assumptions if log else ())),
        device_used=None if context is None else footprint.peak_reserved + context,
    )
