"""The check of a reader's answer to an exercise."""

import math
from typing import Any


def check(answer: Any, truth: Any, tolerance: float = 0.01) -> bool:
    """Check an answer to an exercise without revealing the solution.

    answer: the reader's answer; `None` or `...` means that the exercise is not begun.
    truth: the solution.
    tolerance: for numbers, the allowed difference relative to the truth. NumPy scalars and
        zero-dimensional tensors count as numbers. Anything else must be equal and of the same type.

    Prints one line and returns whether the answer is right.
    """
    if answer is None or answer is ...:
        print("Not answered yet: replace ... by your answer.")
        return False
    answer, truth = (x.item() if getattr(x, "ndim", None) == 0 else x for x in (answer, truth))
    # bool is a subclass of int in Python, but True is no answer to "how many?".
    number = isinstance(truth, (int, float)) and not isinstance(truth, bool)
    if not number:
        right = type(answer) is type(truth) and answer == truth
        print("Right." if right else f"Not yet: {answer!r} is not it.")
        return right
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        print(f"A number is wanted, and this is {answer!r}.")
        return False
    right = math.isclose(answer, truth, rel_tol=tolerance, abs_tol=1e-12)
    if right:
        print("Right.")
    else:
        ratio = answer / truth if truth else math.inf
        print(f"Not yet: {answer:,} is too {'large' if answer > truth else 'small'}{_hint(ratio)}.")
    return right


def _hint(ratio: float) -> str:
    """A hint if the answer is off by a usual factor, such as a unit; else an empty text."""
    for factor, hint in (
        (2**20, "bytes were taken for MiB"),
        (2**30, "bytes were taken for GiB"),
        (1024, "one step of units too far"),
        (1.048576, "10**6 and 2**20 were mixed up"),
        (1.073741824, "10**9 and 2**30 were mixed up"),
        (8, "bits and bytes were mixed up"),
    ):
        if math.isclose(ratio, factor, rel_tol=0.005) or math.isclose(
            ratio, 1 / factor, rel_tol=0.005
        ):
            return f" (perhaps {hint})"
    return ""
