"""What decides whether a plain recipe fits, and what single changes of it save, in words."""

from __future__ import annotations

import dataclasses

from memlab.footprint import Category, Footprint
from memlab.planner.estimates import Estimates
from memlab.planner.result import PAGED_OUT, STATES, WAYS, Option, Switch, is_paged
from memlab.units import gib

CAN_REDUCE = {
    Category.PARAMETERS: "QLoRA",
    Category.GRADIENTS: "LoRA and QLoRA",
    Category.OPTIMIZER_STATES: "an 8-bit or paged optimizer, LoRA and QLoRA",
    Category.ACTIVATIONS: "checkpointing, a smaller micro-batch and shorter sequences",
    Category.TEMPORARY: "a smaller micro-batch and shorter sequences",
}


def decision(start: Option, footprint: Footprint, switches, room: int) -> tuple[str, ...]:
    """What decides, in sentences, from what the plain recipe's peak is made of."""
    states = sum(footprint.breakdown.get(name, 0) for name in STATES)
    largest = max(CAN_REDUCE, key=lambda name: footprint.breakdown.get(name, 0))
    name, way = largest.replace("_", " "), WAYS[start.way]
    share = footprint.breakdown[largest] / footprint.peak_allocated
    most = (
        f"The largest part is {name}, {share:.0%} of the peak, in the {footprint.peak_phase}: "
        f"less of it by {CAN_REDUCE[largest]}."
    )
    enough = [switch.name for switch in switches if switch.fits]
    helps = f"Enough by itself: {', '.join(enough)}." if enough else "No single switch is enough."
    if not start.missing:
        return (f"{way[0].upper()}{way[1:]} fits as it is.", most)
    if states + start.needed - footprint.peak_allocated > room:
        return (
            f"Parameters, gradients and optimizer states are {gib(states)} where {gib(room)} may "
            "be used: checkpointing, a smaller micro-batch and shorter sequences cannot help.",
            f"{most} {helps}",
        )
    return (
        f"Parameters, gradients and optimizer states are {gib(states)} of the {gib(room)} that may "
        f"be used, and the rest of the peak {gib(footprint.peak_allocated - states)}.",
        f"{most} {helps}",
    )


def switches(said: Estimates, start: Option) -> tuple[Switch, ...]:
    """Single changes of the first recipe, the one that saves most first."""
    first, changed = said.combinations[0], {}
    named = {"way": WAYS, "checkpointing": {True: "checkpointing"}}
    for one in said.combinations:
        fields = dataclasses.asdict(one)
        other = {k: v for k, v in fields.items() if v != getattr(first, k)}
        if one.way != first.way and other.keys() <= {"way", "precision"}:
            changed.setdefault(WAYS[one.way], said.recipe(one, 1))
        elif len(other) == 1:
            ((name, value),) = other.items()
            value = named.get(name, {}).get(value, value)
            changed[f"{value}{PAGED_OUT * is_paged(one.optimizer)}"] = said.recipe(one, 1)
    if len(said.batches) > 1:
        changed[f"micro-batch {said.batches[1]}"] = said.recipe(first, said.batches[1])
    if said.question.seq_len > 1:
        half = said.question.seq_len // 2
        changed[f"{half:,} tokens"] = said.recipe(first, 1, seq_len=half)
    found = []
    for name, recipe in changed.items():
        option = said.option(recipe)
        known = option.seconds and start.seconds
        slower = option.seconds - start.seconds if known else None
        found.append(Switch(name, start.needed - option.needed, slower, not option.missing))
    return tuple(sorted(found, key=lambda switch: -switch.saved))
