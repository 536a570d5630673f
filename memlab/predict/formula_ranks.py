"""What a training on one card becomes on each of several.

`divide` takes the formula's moments of a step on one card, each a list of tensors, and says of
each tensor whether a rank holds it whole or a part of it, and what PyTorch's collectives hold
beside: DDP's buckets, the layers that FSDP2 has gathered, the gradients that it is about to sum.

What is not in it: uneven rows of a weight, and that the peak of a rank may fall on a moment that is
none of one card's; how DDP's buckets are filled, whose blocks are counted without their rests; and
that each stream of a collective has free blocks of its own, so that what is reserved is often more
than the formula's range says. benchmarks/ranks.py counts the errors.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memlab import models
from memlab.footprint import Category, Phase
from memlab.spec.recipe import COMPUTED_IN, FULLY_SHARDED, QUANTIZED, Recipe

# What benchmarks/ranks.py found between the formula and simulations, for each `sharding`.
ERRORS = Path(__file__).parent.parent / "data" / "ranks.json"
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@functools.cache
def _errors() -> dict:
    return json.loads(ERRORS.read_text(encoding="utf-8"))


def assumed(recipe: Recipe) -> tuple[str, ...]:
    """How far from simulations the estimate of a rank was (benchmarks/ranks.py); none of one."""
    if recipe.ranks == 1:
        return ()
    found = _errors()[recipe.sharding]
    return (
        f"a rank's bytes by the formula under {recipe.sharding} are an estimate, off by "
        f"{found['median']:.1%} in the median and {found['worst']:.1%} at worst in "
        f"{found['recipes']} simulated trainings",
    )


def alone(recipe: Recipe) -> tuple[Recipe, Recipe]:
    """What one card would run for the pass, and for the update, of one of a recipe's ranks.

    Where FSDP2 gathers weights in half precision, a pass has no autocast: all of it is computed in
    that format, as in a model that is stored in it. The update is that of the weights as stored.

    Raises ValueError for what the formula does not know of ranks.
    """
    update = recipe.but(ranks=1, sharding="ddp")
    if recipe.ranks == 1 or recipe.sharding not in FULLY_SHARDED:
        return update, update
    if recipe.replicas > 1:
        raise ValueError(
            f"replicas is {recipe.replicas}: the formula allows 1, simulate knows more"
        )
    if recipe.base in QUANTIZED:
        raise ValueError(
            f"base is {recipe.base!r} and sharding is {recipe.sharding!r}: the formula allows "
            "none and half, simulate knows more"
        )
    if recipe.task == "seq2seq-lm":
        raise ValueError(
            f"sharding is {recipe.sharding!r}: the formula allows ddp and zero1 for two stacks of "
            "layers, simulate knows more"
        )
    return update.but(base="none", precision=COMPUTED_IN[recipe.precision]), update


class RankTables(NamedTuple):
    """What a rank holds at each moment of a step.

    whole, parts: how many of each tensor it holds whole, and its part of; rows are moments.
    sizes: bytes of such a part. sums, gathered: bytes beside at each moment, of gradients that
    are summed and of gathered weights. share: of the update's work. traffic: rows of (phase,
    bytes sent, bytes moved on the card, how often).
    """

    whole: np.ndarray
    parts: np.ndarray
    sizes: np.ndarray
    sums: np.ndarray
    gathered: np.ndarray
    share: float
    traffic: list[tuple[Phase, float, float, float]]


def divide(recipe: Recipe, table, sizes: np.ndarray, layers: int, weights: np.ndarray, blocks):
    """What one of a recipe's ranks holds of the tensors of `table`, a `formula.Tables`.

    sizes: bytes of each tensor on one card. layers: patterns of them.
    weights: rows of [how large, how many, whether trained], a kind of weight each. blocks: the
    allocator's for sizes. Gives a `RankTables`.
    """
    split = _fully if recipe.sharding in FULLY_SHARDED else _copied
    return split(recipe, table, sizes, table.once + layers * table.each, layers, weights, blocks)


def _copied(recipe, table, sizes, counts, layers, weights, blocks) -> RankTables:
    """Under DistributedDataParallel, whose buckets hold a copy of every gradient all the time."""
    category, in_pass = _columns(table)
    of_update = ~in_pass & (category == Category.TEMPORARY)
    elements, numbers, trained = weights[:, weights[2] > 0]
    bucketed = counts[-1] * (category == Category.GRADIENTS) @ sizes
    each = elements * bucketed / (elements @ numbers)
    others, share = 1 - 1 / recipe.ranks, 1.0
    # Each gradient is copied into its bucket, and the sum back out of it.
    traffic = [
        (Phase.BACKWARD, others * size, 2 * size, 2 * number)
        for size, number in zip(each, numbers, strict=True)
    ]
    if recipe.sharding == "zero1":
        share = first_share(elements, numbers, recipe.ranks)
        traffic += [
            (Phase.STEP, size, 0.0, number) for size, number in zip(each, numbers, strict=True)
        ]
    parts = counts * ((category == Category.OPTIMIZER_STATES) | of_update)
    sums = np.full(len(counts), bucketed)
    return RankTables(counts - parts, parts, sizes * share, sums, sums * 0, share, traffic)


def _fully(recipe, table, sizes, counts, layers, weights, blocks) -> RankTables:
    """Under fully_shard, of each layer by itself and of what stands around the layers together."""
    category, in_pass = _columns(table)
    update = np.arange(len(counts)) >= table.passes[0]
    weight, gradient = category == Category.PARAMETERS, category == Category.GRADIENTS
    half = BYTES[COMPUTED_IN[recipe.precision]]
    stored = BYTES.get(recipe.precision, 4) / half
    each = np.where(weight, table.each[0], 0)
    layer = each @ blocks(sizes)
    around = np.where(weight, counts[0], 0) @ blocks(sizes) - layers * layer

    divided = weight | (category == Category.OPTIMIZER_STATES)
    divided |= ~in_pass & (category == Category.TEMPORARY)
    parts = np.where(divided | (update[:, None] & gradient), counts, 0)
    of_layer = np.where(gradient, table.each[-1], 0)
    sums, behind = np.zeros(len(counts)), np.zeros(len(counts))
    if recipe.accumulation > 1:
        # Whole until the last micro-batch, in the format of the sum.
        grown = blocks(sizes * stored) - blocks(sizes)
        sums = np.where(update, 0, (counts * gradient) @ grown)
    else:
        of_layers = np.flatnonzero(of_layer)
        begun = np.ceil(counts[:, of_layers] / of_layer[of_layers]).max(axis=1, initial=0)
        done = (counts[:, of_layers] >= layers * of_layer[of_layers]).all(axis=1)
        behind = np.where(update, 0, np.where(done, layers, np.maximum(0, begun - 1)))
        finished = np.minimum(counts, behind[:, None] * of_layer) * (of_layer > 0)
        parts = np.where(update[:, None], parts, parts + finished)
        # The sum of the layer before is still on its way.
        sums = np.where(behind > 0, of_layer @ sizes * stored, 0)

    backward = np.array([phase == Phase.BACKWARD for phase in table.phases])
    backward |= behind > 0  # a layer that is run again for its backward pass
    at_head = _at_head(recipe, category, sizes, counts)
    if recipe.sharding == "zero2":
        here = layers - behind + ~backward
    else:
        # Forward: a layer, and what it and the one before were gathered in. Backward: a layer, and
        # what the next is gathered in.
        here = np.where(at_head, 1, np.where(backward, np.minimum(2, layers - behind), 3))
    gathered = np.where(update, 0, around + layer * here)

    others, groups = 1 - 1 / recipe.ranks, layers + 1
    model = np.where(weight, counts[0], 0) @ sizes / groups
    summed = np.where(gradient, counts[-1], 0) @ sizes * stored / groups
    times = recipe.accumulation * groups
    traffic = [(Phase.FORWARD, others * model, 2 * model, times)]
    if recipe.sharding == "zero3":
        traffic.append((Phase.BACKWARD, others * model, 2 * model, times))
    traffic.append((Phase.BACKWARD, others * summed, 2 * summed, groups))
    of_weight = 1.0 if recipe.base == "half" else stored  # of a base; adapters are few
    ratio = np.where(in_pass & weight, of_weight, np.where(in_pass & gradient, stored, 1.0))
    parts_of = sizes * ratio / recipe.ranks
    return RankTables(counts - parts, parts, parts_of, sums, gathered, 1 / recipe.ranks, traffic)


def _columns(table) -> tuple[np.ndarray, np.ndarray]:
    """The category of each tensor of a table, and whether it is of the pass."""
    return np.array(table.categories), np.arange(len(table.categories)) < table.passes[1]


def _at_head(recipe, category, sizes, counts) -> np.ndarray:
    """At which moments something temporary has a number for each token and word: the head's."""
    words = models.config(recipe.model).vocab_size
    large = (category == Category.TEMPORARY) & (sizes >= recipe.batch_size * recipe.seq_len * words)
    return counts @ large > 0


def first_share(elements, numbers, ranks: int) -> float:
    """The share of the weights whose states the first of the ranks keeps under `zero1`.

    ZeroRedundancyOptimizer gives whole weights, the largest first, to the rank that has least.
    """
    weights = np.repeat(elements, numbers.astype(int))
    held = np.zeros(ranks)
    for one in -np.sort(-weights):
        held[held.argmin()] += one
    return held[0] / weights.sum()
