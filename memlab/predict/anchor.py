"""Calibrate the estimated seconds of a GPU by one step that was measured on it."""

import dataclasses

from memlab.gpus import GPU, find_gpu
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe


def anchored(gpu: GPU | str, recipe: Recipe, step_seconds: float) -> GPU:
    """The GPU with its pace: the measured seconds of a step of `recipe` over the estimated ones.

    gpu: a GPU with rates.
    step_seconds: seconds of one optimizer step, measured on that GPU with enough memory free, such
        as `memlab.measure(recipe).step_seconds["median"]`.

    Simulations and plans that use the returned GPU multiply their seconds by the pace. Their range
    of seconds becomes that of a ratio of two steps (`memlab.card.step_time.ANCHORED`). Bytes do not
    change.

    The pace removes much of the error that a slower host or a throttling clock causes. The error of
    a single kernel remains, so measure a step that resembles the steps you ask about.

    Raises ValueError for a GPU without rates, and for seconds that are not above 0.
    """
    if not step_seconds > 0:
        raise ValueError(f"step_seconds is {step_seconds!r}: allowed are numbers above 0")
    # A pace that the GPU already has must not enter the estimate that the new one is relative to.
    card = dataclasses.replace(find_gpu(gpu), pace=None)
    # Seconds do not depend on the memory limit, and the estimate must not run out of memory.
    roomy = dataclasses.replace(card, total_memory=None)
    return dataclasses.replace(
        card, pace=step_seconds / simulate(recipe, roomy).step_seconds.expected
    )
