"""How a plan chooses among options: what fits, and the plainest of what is about as fast."""

import itertools
from collections.abc import Callable, Sequence

from memlab.planner.result import is_paged
from memlab.planner.space import Combination

# Within so much of the least the plainer recipe is told: of two runs of a model at a length on one
# card the ratio of seconds is off by 8 % in the median (the page on accuracy).
ALIKE = 0.08


def groups(candidates: Sequence[Combination]) -> list[list[Combination]]:
    """Combinations in the order of preference of `plainest`, as lists of equals."""

    def place(combination: Combination) -> int:
        return 2 if is_paged(combination.optimizer) else combination.precision == "fp32"

    return [list(group) for _, group in itertools.groupby(sorted(candidates, key=place), place)]


def plainest(
    candidates: Sequence[Combination], seconds: Callable[[Combination], float]
) -> Combination:
    """The first of those that are about as fast as the fastest.

    Recipes whose time can be estimated come first: fp32 only where nothing smaller fits, because
    its throughput is not measured on most cards; paged optimizers last, because the time of paging
    is unknown.
    """
    times = {combination: seconds(combination) for combination in groups(candidates)[0]}
    least = min(times.values())
    return next(combination for combination, time in times.items() if time <= (1 + ALIKE) * least)
