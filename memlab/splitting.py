"""What a training on one card becomes on each of several: an estimate that says what to simulate.

The formula knows one card. What ranks split is divided among them, and what they gather or sum in
buckets is added, from the counts of weights alone.
"""

from __future__ import annotations

from dataclasses import replace

from memlab import models
from memlab.card.step_time import EXPECTED
from memlab.footprint import Category, Footprint, StepTime
from memlab.recipe import COMPUTED_IN, FULLY_SHARDED, Recipe

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
SPLIT_ALWAYS = (Category.PARAMETERS, Category.OPTIMIZER_STATES)
SPLIT = (*SPLIT_ALWAYS, Category.GRADIENTS)
FETCHED = 2  # layers whose weights are here at once: the one at work, and the next


def shared(recipe: Recipe, alone: Footprint, rate: float) -> Footprint:
    """About the footprint of one of a recipe's ranks.

    alone: that of the same recipe with one rank. rate: bytes a second of the link between ranks.

    Under `ddp` every gradient is in a bucket, too. Under `zero2` and `zero3` a rank holds its part
    of parameters, gradients and states, and gathers all weights, or of two layers, in the format
    that they are computed in. Raises ValueError for `zero1`.
    """
    if recipe.sharding == "zero1":
        raise ValueError("sharding is 'zero1': the estimate allows ddp, zero2 and zero3")
    sharded, others = recipe.sharding in FULLY_SHARDED, 1 - 1 / recipe.ranks
    half = BYTES[COMPUTED_IN[recipe.precision]]
    kept = 2 if recipe.precision in BYTES and half == 2 else 4
    weights, trained = alone.parameters, alone.trainable_parameters
    once = (4 if half != kept else kept) * trained  # reduced after the last micro-batch
    if sharded:
        # Until then they stay whole.
        split = SPLIT if recipe.accumulation == 1 else SPLIT_ALWAYS
        gone = {name: round(alone.breakdown[name] * others) for name in split}
        made = half * (weights if recipe.sharding == "zero2" else _at_once(recipe, weights))
        times = 1 if recipe.sharding == "zero2" else 2
        sent = times * half * weights * recipe.accumulation + once
    else:
        gone = {Category.GRADIENTS: -kept * trained}
        made, sent = 0, 2 * kept * trained
    breakdown = dict(alone.breakdown)
    for name, nbytes in gone.items():
        breakdown[name] -= nbytes
    breakdown[Category.TEMPORARY] += made
    time, sent = alone.step_time, round(sent * others)
    return replace(
        alone,
        peak_allocated=alone.peak_allocated - sum(gone.values()) + made,
        breakdown=breakdown,
        reserved_range=None,
        step_time=time and _with_traffic(time, recipe, sent, rate),
    )


def _at_once(recipe: Recipe, weights: int) -> float:
    """Weights of two layers and of what stands around the layers."""
    config = models.config(recipe.model)
    around = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return around + FETCHED * (weights - around) / config.num_hidden_layers


def _with_traffic(time: StepTime, recipe: Recipe, sent: int, rate: float) -> StepTime:
    """A step in which so many bytes are sent beside the passes' kernels, while these last."""
    seconds = sent / (rate * EXPECTED.bandwidth)
    waited = max(0.0, seconds - (time.expected - time.parts["optimizer"]))
    return replace(
        time,
        low=time.low + waited,
        expected=time.expected + waited,
        high=time.high + seconds,
        parts=time.parts | {"communication": waited},
        samples=recipe.batch_size * recipe.accumulation,
        sent=sent,
    )
