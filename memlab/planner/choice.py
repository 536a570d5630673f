"""How a plan chooses among the recipes that fit: the plainest of those that are about as fast."""

import itertools
from collections.abc import Callable, Sequence

from memlab.planner.result import is_paged
from memlab.planner.space import Combination

# A plainer recipe wins if it is slower by at most this share. The ratio of the estimated seconds of
# two recipes (same model, length and GPU) is off by 8 % in the median: the page on accuracy.
ALIKE = 0.08


def groups(candidates: Sequence[Combination]) -> list[list[Combination]]:
    """Split combinations into groups of equal preference, the preferred group first."""

    def place(combination: Combination) -> int:
        # 0: fewer bits than fp32, 1: fp32, 2: paged optimizer
        return 2 if is_paged(combination.optimizer) else combination.precision == "fp32"

    # sorted() is stable, so within a group the plainest combination stays first.
    return [list(group) for _, group in itertools.groupby(sorted(candidates, key=place), place)]


def plainest(
    candidates: Sequence[Combination], seconds: Callable[[Combination], float]
) -> Combination:
    """The first combination that is about as fast as the fastest.

    candidates: combinations that fit, the plainest first. seconds: the time of a step.

    Recipes whose time can be estimated are preferred. So fp32 is chosen only if nothing smaller
    fits, because its throughput is unmeasured on most GPUs. Paged optimizers come last, because the
    time of paging is unknown.
    """
    times = {combination: seconds(combination) for combination in groups(candidates)[0]}
    least = min(times.values())
    return next(combination for combination, time in times.items() if time <= (1 + ALIKE) * least)
