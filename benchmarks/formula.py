"""How far is the closed form from the simulation, and how long does it take?

Prints the error of allocated and reserved over a grid: median, 95th percentile, worst; and the
recipes that the formula refuses.
"""

import time

import numpy as np

from memlab import formula, simulate
from memlab.grid import grid


def recipes():
    """The runs of `memlab record`, and each with half the length and with twice the batch."""
    for recipe in grid().values():
        yield recipe
        yield recipe.but(seq_len=recipe.seq_len // 2)
        yield recipe.but(batch_size=2 * recipe.batch_size)


def main():
    errors, refused, seconds = [], [], []
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
        pair = ("peak_allocated", "peak_reserved")
        errors.append([getattr(quick, name) / getattr(whole, name) - 1 for name in pair])
        allocated, reserved = errors[-1]
        print(f"{allocated:+9.3%} {reserved:+9.3%}  {recipe}", flush=True)
    print(f"{len(errors)} recipes, {len(refused)} refused")
    print(f"a call: {np.median(seconds) * 1e3:.2f} ms")
    for name, values in zip(("allocated", "reserved"), np.array(errors).T, strict=True):
        median, tail = np.percentile(abs(values), (50, 95))
        print(
            f"{name}: median {median:.3%}, 95th percentile {tail:.3%}, "
            f"worst {values.min():+.3%} and {values.max():+.3%}"
        )
    print(*refused, sep="\n")


if __name__ == "__main__":
    main()
