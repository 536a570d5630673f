"""How far is the closed form from the simulation, and how long does it take?

Prints the error of allocated over a grid: median, 95th percentile, worst; how often the range of
reserved holds, and by how much it is missed; and the recipes that the formula refuses.
"""

import time

import numpy as np

from memlab import formula, simulate
from memlab.evidence.grid import grid_runs


def recipes():
    """The runs of `memlab record`, and each with half the length and with twice the batch."""
    for recipe in grid_runs().values():
        yield recipe
        yield recipe.but(seq_len=recipe.seq_len // 2)
        yield recipe.but(batch_size=2 * recipe.batch_size)


def main():
    errors, ranges, refused, seconds = [], [], [], []
    for recipe in recipes():
        try:
            formula(recipe)
        except ValueError as error:
            refused.append(str(error))
            continue
        start = time.process_time()
        quick = formula(recipe)
        seconds.append(time.process_time() - start)
        whole = simulate(recipe)
        errors.append(quick.peak_allocated / whole.peak_allocated - 1)
        ranges.append([end / whole.peak_reserved - 1 for end in quick.reserved_range])
        low, high = ranges[-1]
        print(f"{errors[-1]:+9.3%}  {low:+9.2%} to {high:+9.2%}  {recipe}", flush=True)
    print(f"{len(errors)} recipes, {len(refused)} refused")
    print(f"a call: {np.median(seconds) * 1e3:.2f} ms")
    values = np.array(errors)
    median, tail = np.percentile(abs(values), (50, 95))
    print(
        f"allocated: median {median:.3%}, 95th percentile {tail:.3%}, "
        f"worst {values.min():+.3%} and {values.max():+.3%}"
    )
    low, high = np.array(ranges).T
    inside = (low <= 0) & (high >= 0)
    print(
        f"reserved: {inside.sum()} of {len(inside)} inside the range, whose upper end is "
        f"{np.median(high):+.2%} in the median, {high.min():+.2%} and {high.max():+.2%} at worst"
    )
    print(*refused, sep="\n")


if __name__ == "__main__":
    main()
