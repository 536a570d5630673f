"""The footprint of a run on the simulated GPU: memory, CUDA context and time of a step."""

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
    """The footprint of a ledger whose allocator is a `CardMemory`, with the CUDA context.

    work: `memlab.trace.work.Work` -> how often a step does it. If it is empty, or the time of a
        step cannot be estimated, `no_time` says why.
    log: the log that was replayed, with its parameter counts and assumptions; None for a run.
    samples: sequences per step.
    link: the link between ranks, a name as in `memlab.card.links.link_rate`.
    """
    memory: Any = ledger.allocator  # a CardMemory
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
        # As nvidia-smi shows it. The context of some GPUs is not known.
        device_used=None if context is None else footprint.peak_reserved + context,
    )
