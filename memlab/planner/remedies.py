"""What a plan proposes if nothing fits: last resorts, other ways, shorter sequences, more GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memlab.gpus import GPU, find_gpu
from memlab.planner.answers import Answers, has_runs_only
from memlab.planner.cards import LADDER
from memlab.planner.result import WAYS, WORST, Option, described
from memlab.planner.space import Combination, bytes_per_weight, computes
from memlab.predict.fit import room

if TYPE_CHECKING:
    from memlab.planner.search import Search

RANKS = (2, 4, 8, 16, 32, 64)  # numbers of GPUs to propose if one is not enough
# Neither last resort can clip: no moment of its step has all gradients on the GPU.
UNCLIPPED = {"max_grad_norm": 0.0}
# Recipes to try before a larger GPU is proposed. All of them train every weight. The first keeps
# gradients and AdamW's states on the host, which costs time only. The second trains bf16 weights,
# whose small updates are rounded away. Its 8-bit states may be paged out, and each parameter is
# stepped as soon as its gradient is there.
LAST_RESORTS = (
    (
        Combination("full", "bf16-amp", "adamw_torch_fused", checkpointing=True),
        UNCLIPPED | {"optimizer_offload": "gradients"},
        "torchao",
    ),
    (
        Combination("full", "bf16", "paged_adamw_8bit", checkpointing=True),
        UNCLIPPED | {"step_in_backward": True},
        "bitsandbytes",
    ),
)


def last_resorts(search: Search) -> tuple[Option, ...]:
    """The options of `LAST_RESORTS` that fit.

    Only for questions that allow full fine-tuning, on one GPU with native bf16. A recipe whose
    package is not installed is skipped.
    """
    question, candidates = search.question, []
    asked = "full" in question.ways and question.ranks == 1
    if not asked or "bfloat16" not in search.card.native_dtypes:
        return ()
    recipes, answers = search.recipes, search.answers
    for combination, changes, package in LAST_RESORTS:
        # Lower bound: the weights. Gradients and states are never all on the GPU at once.
        least = recipes.weights * bytes_per_weight(combination.precision) + answers.context
        if importlib.util.find_spec(package) and least <= answers.room:
            combination = recipes.in_parts(combination) or combination
            candidates.append(
                answers.simulated(recipes.recipe(combination, recipes.batches[-1], **changes))
            )
    return tuple(option for option in candidates if not option.missing)


NO_CARD = f"none of {', '.join(LADDER)}: see the book's chapter 17-parallel"


def remedies(
    search: Search, tiers: dict[int, Option], sparing: tuple[Option, ...]
) -> Iterable[str]:
    """Yield in words what would fit where nothing of the question does.

    In this order: last resorts, other ways to train, expandable segments, a shorter sequence, more
    ranks, a larger GPU.
    tiers: the nearest option of each tier. sparing: the last resorts that fit.
    """
    for option in sparing:
        worse = "; it may train worse" * (option.tier == WORST)
        yield f"tier {option.tier}, {option}{worse}"
    for way in WAYS:
        other = None if way in search.question.ways else _other_way(search, way)
        if other:
            yield str(other)
    nearest = min(tiers.values(), key=lambda option: option.missing)
    if not nearest.at_least and not nearest.recipe.expandable_segments:
        unfragmented = search.answers.simulated(nearest.recipe.but(expandable_segments=True))
        if not unfragmented.missing:
            yield f"segments that grow in place (--expandable-segments), with {unfragmented}"
    if not nearest.at_least and not has_runs_only(nearest.recipe):
        length, _ = search.answers.largest_size(nearest.recipe, "seq_len", own_fits=False)
        if length:
            yield f"sequences of {length:,} tokens, with {described(nearest.recipe)}"
    shared = _more_ranks(search)
    if shared:
        yield f"{shared.recipe.ranks} x {search.card.name}, with {shared}"
    for card in map(find_gpu, LADDER):
        larger = _on_larger(search, card, tiers)
        if larger:
            yield f"{card.name}, with {larger}"
            return


def _other_way(search: Search, way: str) -> Option | None:
    """The best option of a way that the question leaves out; None if it does not fit."""
    try:
        candidates, _ = search.recipes.of_ways((way,))
    except ValueError:  # no adapters for this model, or no such way with ranks
        return None
    return search.best_of(candidates)


def _more_ranks(search: Search) -> Option | None:
    """The most sparing recipe on the fewest GPUs that suffice; None if none of `RANKS` does."""
    asked, answers, recipes = search.question, search.answers, search.recipes
    for ranks in RANKS:
        if ranks <= asked.ranks or asked.effective_batch % ranks:
            continue
        try:
            candidates, _ = recipes.of_ways(asked.ways, ranks)
        except ValueError:  # no way is left
            return None
        combination = recipes.most_sparing(candidates, ranks)
        if recipes.least_bytes(combination, ranks) + answers.context <= answers.room:
            option = answers.simulated(recipes.recipe(combination, 1, ranks=ranks))
            if not option.missing:
                return option
    return None


def _on_larger(search: Search, card: GPU, tiers: dict[int, Option]) -> Option | None:
    """The first option of the tiers that fits on `card`; None if the GPU is not larger."""
    larger = (card.total_memory or 0) > search.answers.total_memory
    if not larger or not computes(card, search.question):
        return None
    there = Answers(search.question, card, search.margin, search.say)
    for option in tiers.values():
        # The bytes on the smaller GPU are a filter only: this GPU has other kernels and workspaces.
        if option.needed <= room(card, search.margin):
            simulated = there.simulated(option.recipe)
            if not simulated.missing:
                return simulated
    return None
