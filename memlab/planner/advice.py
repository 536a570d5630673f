"""What decides whether a recipe fits, and what single changes of it save, in words."""

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
CAN_REDUCE = {
    Category.PARAMETERS: ("QLoRA",),
    Category.GRADIENTS: ("LoRA", "QLoRA"),
    Category.OPTIMIZER_STATES: ("an 8-bit or paged optimizer", "LoRA", "QLoRA"),
    Category.ACTIVATIONS: ("checkpointing", *SMALLER),
    Category.TEMPORARY: SMALLER,
}


def remedies_of(part: Category, recipe: Recipe) -> str:
    """What makes a part of a recipe's peak smaller and is not in the recipe yet, in words."""
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
    *before, last = names or ["a smaller model", "more cards"]
    return f"{', '.join(before)} and {last}" if before else last


def decision(search: Search, start: Option, changes: tuple[Switch, ...]) -> tuple[str, ...]:
    """What decides, in sentences, from what a recipe's peak is made of."""
    room = search.answers.room
    if start.at_least:
        return (
            f"Weights, gradients and optimizer states are at least {gib(start.needed)} where "
            f"{gib(room)} may be used: checkpointing, a smaller micro-batch and shorter sequences "
            "cannot help.",
        )
    ledger = Ledger()  # of tensors, without an allocator
    replay(search.answers.log(start.recipe).events(), ledger)
    peak = ledger.footprint()
    parts, allocated = peak.breakdown, peak.peak_allocated
    states = sum(parts[name] for name in STATES)
    largest = max(CAN_REDUCE, key=lambda name: parts[name])
    name, way = largest.replace("_", " "), WAYS[start.way]
    most = (
        f"The largest part is {name}, {parts[largest] / allocated:.0%} of the peak, in the "
        f"{peak.peak_phase}: less of it by {remedies_of(largest, start.recipe)}."
    )
    if not start.missing:
        plain = start.recipe.checkpointing == "none" and start.tier == 1
        return (f"{way[0].upper()}{way[1:]} fits as it is.", most) if plain else (most,)
    enough = [change.name for change in changes if change.fits]
    helps = f"Enough by itself: {', '.join(enough)}." if enough else "No single switch is enough."
    if states + start.needed - allocated > room:
        return (
            f"Parameters, gradients and optimizer states are {gib(states)} where {gib(room)} may "
            "be used: checkpointing, a smaller micro-batch and shorter sequences cannot help.",
            f"{most} {helps}",
        )
    return (
        f"Parameters, gradients and optimizer states are {gib(states)} of the {gib(room)} that may "
        f"be used, and the rest of the peak {gib(allocated - states)}.",
        f"{most} {helps}",
    )


def switches(search: Search, start: Option) -> tuple[Switch, ...]:
    """Single changes of a recipe, the one that saves most first.

    Of other ways, optimizers and formats those that the search has asked about; none of a recipe
    whose weights and states alone are too many, and no other sizes of one that fits where each is a
    run of its own.
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
        alike = dataclasses.replace(combination, loss=own.loss)
        name = _named_change(own, alike)
        again = combination.checkpointing != own.checkpointing
        if name and name not in changed and (again or combination in search.traced):
            changed[name] = recipes.recipe(alike, batch)
    sizes = bool(start.missing) or not has_runs_only(recipe)
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
    """The only thing in which a combination differs, in words; empty where there are more."""
    before, after = vars(own), vars(combination)
    other = {name for name in before if before[name] != after[name]}
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
    fits = tensors <= answers.room and not answers.simulated(recipe).missing
    slower = seconds - start.seconds if seconds and start.seconds else None
    return Switch(name, answers.tensors(start.recipe) - tensors, slower, fits)
