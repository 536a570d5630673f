"""Advice in words: what decides whether a recipe fits, and what each single change saves.

All figures come from `memlab.planner.answers`. Bytes saved are bytes of tensors at the peak, before
the caching allocator rounds them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memlab.footprint import Category
from memlab.planner.answers import has_runs_only
from memlab.planner.result import PAGED_OUT, STATES, WAYS, Option, Switch, is_paged, way_of
from memlab.planner.space import Combination
from memlab.spec.optimizers import OPTIMIZERS
from memlab.spec.recipe import QUANTIZED, Recipe
from memlab.trace.ledger import Ledger
from memlab.trace.log import replay
from memlab.units import gib

if TYPE_CHECKING:
    from memlab.planner.search import Search

SMALLER = "a smaller micro-batch", "shorter sequences"
# Part of the peak -> what makes it smaller, in the order of printing. Inputs, buffers, workspaces
# and rounding have no remedy of their own.
CAN_REDUCE = {
    Category.PARAMETERS: ("QLoRA",),
    Category.GRADIENTS: ("LoRA", "QLoRA"),
    Category.OPTIMIZER_STATES: ("an 8-bit or paged optimizer", "LoRA", "QLoRA"),
    Category.ACTIVATIONS: ("checkpointing", *SMALLER),
    Category.TEMPORARY: SMALLER,
}


def remedies_of(part: Category, recipe: Recipe) -> str:
    """Name the changes that shrink one part of a recipe's peak and that it does not make yet."""
    optimizer = OPTIMIZERS[recipe.optimizer]
    there = {
        "QLoRA": recipe.base in QUANTIZED,
        "LoRA": recipe.lora_rank > 0,
        "an 8-bit or paged optimizer": optimizer.bits < 32 or optimizer.paged,
        "checkpointing": recipe.checkpointing != "none",
        "a smaller micro-batch": recipe.batch_size == 1,
        "shorter sequences": recipe.seq_len == 1,
    }
    names = [name for name in CAN_REDUCE[part] if not there[name]]
    # Several ranks share parts of the peak under sharding, which a quantized base does not have.
    more = "a larger card" if recipe.base in QUANTIZED else "more cards"
    *before, last = names or ["a smaller model", more]
    return f"{', '.join(before)} and {last}" if before else last


def decision(search: Search, start: Option, changes: tuple[Switch, ...]) -> tuple[str, ...]:
    """Explain in sentences what decides whether `start` fits, from the parts of its peak.

    changes: the switches of `start`, as `switches` returns them.
    """
    room = search.answers.room
    if start.at_least:
        return (
            f"Weights, gradients and optimizer states take at least {gib(start.needed)}, but only "
            f"{gib(room)} may be used: checkpointing, a smaller micro-batch and shorter sequences "
            "cannot help.",
        )
    ledger = Ledger()  # without an allocator: bytes of tensors, no rounding
    replay(search.answers.log(start.recipe).events(), ledger)
    peak = ledger.footprint()
    parts, allocated = peak.breakdown, peak.peak_allocated
    states = sum(parts[name] for name in STATES)
    largest = max(CAN_REDUCE, key=lambda name: parts[name])
    name, way = largest.replace("_", " "), WAYS[start.way]
    most = (
        f"The largest part is {name}, {parts[largest] / allocated:.0%} of the peak, in the "
        f"{peak.peak_phase}: it shrinks with {remedies_of(largest, start.recipe)}."
    )
    if not start.missing:
        plain = start.recipe.checkpointing == "none" and start.tier == 1
        return (f"{way[0].upper()}{way[1:]} fits as it is.", most) if plain else (most,)
    enough = [change.name for change in changes if change.fits]
    helps = f"Enough by itself: {', '.join(enough)}." if enough else "No single switch is enough."
    # needed - allocated: the context, and what the allocator needs on top of the tensors. If this
    # and the states fill the room already, no saving in activations can help.
    if states + start.needed - allocated > room:
        return (
            f"Parameters, gradients and optimizer states take {gib(states)}, but only {gib(room)} "
            "may be used: checkpointing, a smaller micro-batch and shorter sequences cannot help.",
            f"{most} {helps}",
        )
    return (
        f"Parameters, gradients and optimizer states take {gib(states)} of the {gib(room)} that "
        f"may be used, and the rest of the peak takes {gib(allocated - states)}.",
        f"{most} {helps}",
    )


def switches(search: Search, start: Option) -> tuple[Switch, ...]:
    """Single changes to the recipe of `start`, the one that saves most first.

    Other ways, optimizers and number formats are listed only if the search has traced them. There
    are no switches if weights, gradients and states alone do not fit. A recipe that needs a run for
    each size (`has_runs_only`) gets other sizes only if it does not fit.
    """
    recipe, recipes = start.recipe, search.recipes
    if start.at_least:
        return ()
    batch, changed = recipe.batch_size, {}
    own = Combination(
        way_of(recipe),
        recipe.precision,
        recipe.optimizer,
        recipe.checkpointing != "none",
        recipe.sharding,
        recipe.loss,
    )
    for combination in recipes.combinations:
        # `start` may have its loss in parts, unlike the combinations of the question. A switch
        # keeps that loss, which would be a second change.
        alike = dataclasses.replace(combination, loss=own.loss)
        name = _named_change(own, alike)
        # Switching checkpointing is worth a trace of its own; the rest must be traced already.
        again = combination.checkpointing != own.checkpointing
        if name and name not in changed and (again or combination in search.traced):
            changed[name] = recipes.recipe(alike, batch)
    sizes = bool(start.missing) or not has_runs_only(recipe)
    # With a single sequence there is no smaller micro-batch: show what the next larger one costs.
    smaller = [n for n in recipes.batches if n < batch] or recipes.batches[1:2]
    if smaller and sizes:
        changed[f"micro-batch {smaller[-1]}"] = recipes.recipe(own, smaller[-1])
    if recipe.seq_len > 1 and sizes:
        half = recipe.seq_len // 2
        changed[f"{half:,} tokens"] = recipes.recipe(own, batch, seq_len=half)
    return tuple(
        sorted(
            (_switch(search, start, name, other) for name, other in changed.items()),
            key=lambda switch: -switch.saved,
        )
    )


def _named_change(own: Combination, combination: Combination) -> str:
    """Name the one thing in which `combination` differs from `own`; empty if more than one does."""
    before, after = vars(own), vars(combination)
    other = {name for name in before if before[name] != after[name]}
    # Another way brings a precision and an optimizer of its own, and is still one change.
    if combination.way != own.way and other <= {"way", "precision", "optimizer"}:
        return WAYS[combination.way]
    if len(other) != 1:
        return ""
    (name,) = other
    if name == "checkpointing":
        return "checkpointing" if combination.checkpointing else "no checkpointing"
    return f"{after[name]}{PAGED_OUT * is_paged(combination.optimizer)}"


def _switch(search: Search, start: Option, name: str, recipe: Recipe) -> Switch:
    answers = search.answers
    tensors, seconds = answers.tensors(recipe), answers.seconds(recipe)
    # The peak of a trace takes milliseconds: replay through the allocator only what passes it.
    fits = tensors <= answers.room and not answers.simulated(recipe).missing
    slower = seconds - start.seconds if seconds and start.seconds else None
    return Switch(name, answers.tensors(start.recipe) - tensors, slower, fits)
