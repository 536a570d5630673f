"""How a plan chooses among options: what fits, and the plainest of what is about as fast."""

from collections.abc import Callable, Sequence

from memlab.planner.result import Option, is_paged
from memlab.planner.space import Combination

# Within so much of the least the plainer recipe is told: of two runs of a model at a length on one
# card the ratio of seconds is off by 8 % in the median (the page on accuracy).
ALIKE = 0.08


def groups(candidates: Sequence[Combination]) -> list[list[Combination]]:
    """Combinations in the order of preference of `plainest`, as lists of equals."""
    pages = [combination for combination in candidates if is_paged(combination.optimizer)]
    plain = [
        combination
        for combination in candidates
        if combination.precision == "fp32" and combination not in pages
    ]
    rest = [
        combination
        for combination in candidates
        if combination not in pages and combination not in plain
    ]
    return [group for group in (rest, plain, pages) if group]


def plainest(
    options: dict[Combination, Option], seconds: Callable[[Option], float]
) -> Combination | None:
    """The first of those that are about as fast as the fastest; None of none.

    Recipes whose time can be estimated come first: fp32 only where nothing smaller fits, because
    its throughput is not measured on most cards; paged optimizers last, because the time of paging
    is unknown.
    """
    if not options:
        return None
    times = {combination: seconds(options[combination]) for combination in groups(list(options))[0]}
    least = min(times.values())
    return next(combination for combination, time in times.items() if time <= (1 + ALIKE) * least)
