"""Sizes as products of symbols: micro-batch, length, LoRA rank, positions, window.

A training at chosen sizes makes tensors whose bytes say by their prime factors which sizes are in
them, also where a kernel rounds the length up. `Symbols` reads such numbers into terms, and terms
give the bytes at any other sizes. Nothing is fitted: what is no product of the chosen sizes is a
constant.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from memlab.trace.reductions import Reduction

# What kernels, masks and chunks of linear attention round lengths up to.
ROUNDED = (8, 16, 32, 64, 128)
ALIGNED = 16  # the largest power of two that matters to which events happen
LEAST, MOST = 23, 20_000  # the smallest prime that tells a length, and the longest length
FEWEST = 11  # sequences
RANK_UNIT = 16  # in a rank, so that adapters are whole blocks of 8-bit states
TOKENS = 2**18  # of a micro-batch: the values of more are not known (memlab.card.known_values)
APART = 512  # positions or a window differ so much from the length
SHIFTS = 1, -1, 2  # labels are shifted by one; a causal convolution of 3 tokens (LFM2) pads by two
POSITIONS_SHIFT = 2  # the learned positions of OPT and BART begin after two that are not used

Factors = Mapping[str, Any]  # name -> whole number, or any, where many are tried at once


class ReductionBytes(NamedTuple):
    """The buffer of a sum along rows (`memlab.trace.reductions`), as a factor of a term."""

    rows: Term
    columns: Term

    def at(self, factors: Factors) -> int:
        """Its bytes with these factors, of which T is how many threads the card holds at once."""
        return Reduction(self.rows.at(factors), self.columns.at(factors)).buffer(int(factors["T"]))


class Term(NamedTuple):
    """constant / divisor times powers of factors, each (name, or sums, and exponent)."""

    constant: int
    divisor: int
    powers: tuple[tuple[str | ReductionBytes, int], ...]

    def at(self, factors: Factors, item: int = 1) -> int:
        """The number with these factors (`factors_of`), rounded up to whole items."""
        return -(-self.times(factors) // (self.divisor * item)) * item

    def times(self, factors: Factors) -> Any:
        """The number before it is divided."""
        value: Any = self.constant
        for name, exponent in self.powers:
            number = factors[name] if isinstance(name, str) else name.at(factors)
            value *= number**exponent
        return value


def factors_of(sizes: Factors) -> dict[str, Any]:
    """What sizes are found as in the number of a tensor's elements.

    The length s also shifted (`SHIFTS`) and rounded up, the positions P also shifted.
    """
    length = sizes["s"]
    shifted = {f"s{shift:+}": length + shift for shift in SHIFTS}
    rounded = {f"s~{unit}": -(-length // unit) * unit for unit in ROUNDED}
    positions = {f"P{POSITIONS_SHIFT:+}": sizes["P"] + POSITIONS_SHIFT} if sizes.get("P") else {}
    return {**sizes, **shifted, **rounded, **positions}


class Symbols:
    """The chosen sizes, and what a number at these sizes is made of."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        factors: dict[int, str] = {}
        for name, value in factors_of(sizes).items():
            if value > 1:
                factors.setdefault(value, name)  # a rounded length that is the length is s
        primes = [(name, value, largest_prime(value)) for value, name in factors.items()]
        # The largest prime first: a small one is the likeliest to be in a constant, too.
        self._factors = sorted(primes, key=lambda factor: -factor[2])
        self._terms: dict[tuple[int, bool, bool], Term] = {}

    def term(self, number: int, whole: bool = False, of_model: bool = False) -> Term:
        """The number, at least 0, as a product of sizes and a constant.

        whole: it is a whole number of times the product of some sizes, as operations are. Then a
        prime too many is its own: the five products of an attention's backward pass are no further
        size of a head. of_model: whether batch and length are not in it.
        """
        key = number, whole, of_model
        if key not in self._terms:
            self._terms[key] = self._read(*key)
        return self._terms[key]

    def _read(self, number: int, whole: bool, of_model: bool) -> Term:
        left, below, powers = number, 1, []
        for name, value, prime in self._factors if number else ():
            if of_model and name[0] in "bs":
                continue
            exponent = 0
            while left % value == 0:  # whole, so that it takes along the primes of other sizes
                left, exponent = left // value, exponent + 1
            while not whole and left % prime == 0:
                left, exponent = left // prime, exponent + 1
                below *= value // prime
            if exponent:
                powers.append((name, exponent))
        shared = math.gcd(left, below)
        return Term(left // shared, below // shared, tuple(powers))


def chosen_sizes(
    own: Collection[int],
    *,
    one_sequence: bool,
    alignment: int,
    inside: bool,
    rank: int | None,
    widths: Collection[int] = (),
) -> dict[str, int]:
    """Sizes that can be told from each other and from a model's own numbers.

    Of b, s, r and of P and w, the positions and the window that a model is to have. own: the
    numbers of the model. one_sequence: b is 1. alignment: the greatest common divisor of s and
    `ALIGNED`. inside: s is within the window. rank: the largest r there may be, None for none.
    widths: those of the model that are chosen, too.

    Raises ValueError where there are none.
    """
    own = {number for number in own if number > 1}
    free = [prime for prime in _primes() if all(number % prime for number in own)]
    taken, primes = set(free), {largest_prime(width) for width in widths}
    for length, telling in _lengths(alignment):
        if not telling <= taken - primes:
            continue
        others = factors_of({"s": length}).values()
        left = [prime for prime in free if all(value % prime for value in others)]
        sizes = {"s": length, "b": 1}
        if rank is not None:
            unit = RANK_UNIT if rank >= RANK_UNIT * FEWEST else 1
            sizes["r"] = unit * max((p for p in left if p * unit <= rank), default=0)
            left = [p for p in left if p * unit != sizes["r"]]
        if not one_sequence:
            sizes["b"] = next((p for p in left if p * length <= TOKENS), 0)
        unused = set(left) - {largest_prime(size) for size in sizes.values()}
        longer = [p for p in left if p > length + APART]
        positions = [p for p in longer if largest_prime(p + POSITIONS_SHIFT) in unused][:1]
        windows = [p for p in longer if [p] > positions]
        if not inside:
            windows = [p for p in left if sizes["b"] < p < length - APART][::-1]
        if positions and windows and all(sizes.values()):
            return sizes | {"P": positions[0], "w": windows[0]}
    raise ValueError("no sizes can be told from the numbers of the model")


@functools.cache
def _primes() -> list[int]:
    return [n for n in range(FEWEST, MOST + 2 * APART) if largest_prime(n) == n]


@functools.cache
def _lengths(alignment: int) -> list[tuple[int, set[int]]]:
    """Lengths of which each form has a large prime that divides no other; with these primes."""
    chosen = []
    for length in range(alignment, MOST, alignment):
        rounded = [-(-length // unit) * unit for unit in ROUNDED if unit > alignment]
        forms = {length, *(length + shift for shift in SHIFTS), *rounded}
        if math.gcd(length, ROUNDED[-1]) != alignment or len(forms) <= len(SHIFTS) + len(rounded):
            continue
        telling = {largest_prime(form) for form in forms}
        is_unique = all(sum(form % prime == 0 for form in forms) == 1 for prime in telling)
        if is_unique and len(telling) == len(forms) and min(telling) >= LEAST:
            chosen.append((length, telling))
    return chosen


def largest_prime(number: int) -> int:
    """The largest prime that divides a number; 1 of 1."""
    largest, divisor = 1, 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            largest, number = divisor, number // divisor
        divisor += 1
    return max(largest, number)
