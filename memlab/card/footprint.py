"""The footprint of what ran on a card: its context and its seconds beside the tensors' bytes."""

from dataclasses import replace

from memlab.card.step_time import step_time
from memlab.footprint import Footprint
from memlab.trace.ledger import Ledger
from memlab.trace.log import Log


def card_footprint(
    ledger: Ledger, counts=None, samples: int | None = None, link: str | None = None
) -> Footprint:
    """The footprint of a ledger that a `CardMemory` serves, with the card's context.

    counts: what knows `parameters` and `trainable_parameters`, a Log or a Training; of a Log the
        `assumptions` and the work, too. samples: sequences of the step. link:
        between ranks, as `memlab.card.links.link_rate` has it.
    """
    gpu = ledger.allocator.gpu
    footprint, context = ledger.footprint(), gpu.context
    log = getattr(ledger, "work", None)  # a replay has none of its own
    work = counts.work if isinstance(counts, Log) else log and log.of_step
    seconds, no_time = None, "what its operators do is not known"
    if work is not None and not work:
        no_time = "no operator has run on the card"
    elif work is not None:
        try:
            seconds, no_time = step_time(work, gpu, samples, link), ""
        except ValueError as error:
            no_time = str(error)
    return replace(
        footprint,
        step_time=seconds,
        no_time=no_time,
        parameters=counts and counts.parameters,
        trainable_parameters=counts and counts.trainable_parameters,
        context=context,
        assumptions=(*ledger.assumptions, *getattr(counts, "assumptions", ())),
        device_used=None if context is None else footprint.peak_reserved + context,
    )
