"""One measured step of a card puts right the seconds of all others on it."""

import dataclasses

from memlab.gpus import GPU, find_gpu
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe


def anchored(gpu: GPU | str, recipe: Recipe, step_seconds: float) -> GPU:
    """The card, with a pace: what a step of `recipe` took there over what is estimated.

    gpu: a card with rates. step_seconds: of one optimizer step, measured on it with room for all,
    as `memlab.measure(recipe).step_seconds["median"]`.

    Simulations and plans of the result multiply their seconds by the pace, and their
    range is that of a ratio (`memlab.card.step_time.ANCHORED`). Bytes stay as they are. Of programs
    whose host is slower, or whose clock throttles, much of the error goes; that of one kernel does
    not, so take a step like those that you ask about.

    Raises ValueError for a card without rates and for seconds that are not above 0.
    """
    if not step_seconds > 0:
        raise ValueError(f"step_seconds is {step_seconds!r}: allowed are numbers above 0")
    card = dataclasses.replace(find_gpu(gpu), pace=None)
    roomy = dataclasses.replace(card, total_memory=None)
    return dataclasses.replace(
        card, pace=step_seconds / simulate(recipe, roomy).step_seconds.expected
    )
