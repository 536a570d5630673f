"""Tensor sizes as products of symbols: micro-batch, length, LoRA rank, positions, window.

A training is recorded at sizes that each have a large prime factor of their own. The prime factors
of a tensor's bytes then show which sizes are in it, even if a kernel has rounded the length up.
`Symbols` reads numbers into terms, and a term gives the number at any other sizes. Nothing is
fitted: a number that is no product of the chosen sizes is a constant.

Known limitation: sums of sizes are not found, except for the length plus or minus 1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from memlab.trace.reductions import Reduction

# Multiples to which kernels, masks and chunks of linear attention round lengths up.
ROUNDED = (8, 16, 32, 64, 128)
ALIGNED = 16  # divisibility by larger powers of two does not change which events happen
LEAST, MOST = 23, 20_000  # the smallest prime that identifies a length, and the longest length
FEWEST = 11  # the smallest prime that is used at all, so the smallest chosen batch of several
RANK_UNIT = 16  # factor of a chosen rank, so that adapters are whole blocks of 8-bit states
TOKENS = 2**18  # limit of a micro-batch: memlab.card.known_values keeps no more values per tensor
APART = 512  # least difference of the positions, and of the window, from the length

Factors = Mapping[str, Any]  # name -> integer, or a float where many sizes are tried


class ReductionBytes(NamedTuple):
    """The bytes of the buffer of a sum along rows (`memlab.trace.reductions`), as a factor."""

    rows: Term
    columns: Term

    def at(self, factors: Factors) -> int:
        """The bytes with these factors; T is how many threads the GPU keeps resident at once."""
        return Reduction(self.rows.at(factors), self.columns.at(factors)).buffer(int(factors["T"]))


class Term(NamedTuple):
    """constant / divisor times powers of factors, each (name or buffer of a sum, exponent)."""

    constant: int
    divisor: int
    powers: tuple[tuple[str | ReductionBytes, int], ...]

    def at(self, factors: Factors, item: int = 1) -> int:
        """The number with these factors (`factors_of`), rounded up to a multiple of `item`."""
        return -(-self.times(factors) // (self.divisor * item)) * item

    def times(self, factors: Factors) -> Any:
        """The number before the division by `divisor`."""
        value: Any = self.constant
        for name, exponent in self.powers:
            number = factors[name] if isinstance(name, str) else name.at(factors)
            value *= number**exponent
        return value


def factors_of(sizes: Factors) -> dict[str, Any]:
    """Every form in which sizes occur in the number of a tensor's elements.

    The length s also occurs as s + 1 and s - 1, for shifted labels, and rounded up, as `s~64`.
    """
    length = sizes["s"]
    rounded = {f"s~{unit}": -(-length // unit) * unit for unit in ROUNDED}
    return {**sizes, "s+1": length + 1, "s-1": length - 1, **rounded}


class Symbols:
    """The chosen sizes; reads numbers at these sizes into terms."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        factors: dict[int, str] = {}
        for name, value in factors_of(sizes).items():
            if value > 1:
                # A rounded length that equals the length is read as s: s comes first of all forms.
                factors.setdefault(value, name)
        primes = [(name, value, largest_prime(value)) for value, name in factors.items()]
        # The largest prime first, because a small one is more likely to occur in a constant, too.
        self._factors = sorted(primes, key=lambda factor: -factor[2])
        self._terms: dict[tuple[int, bool, bool], Term] = {}

    def term(self, number: int, whole: bool = False, of_model: bool = False) -> Term:
        """A number, at least 0, as a product of sizes and a constant.

        whole: whether sizes occur only as whole factors, as in a number of operations. A prime on
        its own then belongs to the constant. So the five products of attention's backward pass are
        not read as part of a head size that has the prime 5. of_model: whether the number depends
        on neither batch nor length.
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
            # First the whole size, because other sizes may have its smaller primes, too.
            while left % value == 0:
                left, exponent = left // value, exponent + 1
            # Then its largest prime alone, as in the number of chunks of 64 tokens, s~64 / 64. The
            # rest of the size goes into the divisor.
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
    sums: Mapping[str, tuple[str, int]] = MappingProxyType({}),
) -> dict[str, int]:
    """Sizes with primes of their own, which divide no other size and no number of the model.

    The symbols are b (sequences), s (length), r (LoRA rank), and P and w, the positions and the
    window that the model is given. own: the numbers of the model. one_sequence: b is 1. alignment:
    the greatest common divisor of s and `ALIGNED`. inside: s is shorter than the window. rank: the
    largest allowed r, None for no adapters. widths: widths of the model that are chosen, too.
    sums: symbol -> (symbol, addend), for sizes that are another size plus a constant.

    Raises ValueError if there are no such sizes.
    """
    own = {number for number in own if number > 1}
    # Primes that divide none of the model's numbers.
    free = [prime for prime in _primes() if all(number % prime for number in own)]
    taken, primes = set(free), {largest_prime(width) for width in widths}
    for length, telling in _lengths(alignment):
        if not telling <= taken - primes:
            continue
        # The other sizes take primes that divide no form of the length.
        others = factors_of({"s": length}).values()
        left = [prime for prime in free if all(value % prime for value in others)]
        sizes = {"s": length, "b": 1}
        if rank is not None:
            unit = RANK_UNIT if rank >= RANK_UNIT * FEWEST else 1
            # 0 if no prime fits, and this length is given up below.
            sizes["r"] = unit * max((p for p in left if p * unit <= rank), default=0)
            left = [p for p in left if p * unit != sizes["r"]]
        if not one_sequence:
            sizes["b"] = next((p for p in left if p * length <= TOKENS), 0)
        # P is above the length, and w is above it or below it.
        longer = [p for p in left if p > length + APART]
        shorter = [p for p in left if sizes["b"] < p < length - APART][-1:]
        if not shorter or not all(sizes.values()):
            continue
        for positions, next_longer in itertools.pairwise(longer):
            chosen = sizes | {"P": positions, "w": next_longer if inside else shorter[0]}
            added = {name: chosen[of] + addend for name, (of, addend) in sums.items()}
            apart = set(left) - {largest_prime(size) for size in chosen.values()}
            if {largest_prime(size) for size in added.values()} <= apart:
                return chosen | added
    raise ValueError("no sizes can be recognized in the numbers of the model")


@functools.cache
def _primes() -> list[int]:
    return [n for n in range(FEWEST, MOST + 2 * APART) if largest_prime(n) == n]


@functools.cache
def _lengths(alignment: int) -> list[tuple[int, set[int]]]:
    """(length, primes) of all lengths whose forms each have a large prime that divides no other."""
    chosen = []
    for length in range(alignment, MOST, alignment):
        # Forms rounded to a smaller unit are the length itself.
        rounded = [-(-length // unit) * unit for unit in ROUNDED if unit > alignment]
        forms = {length, length + 1, length - 1, *rounded}
        if math.gcd(length, ROUNDED[-1]) != alignment or len(forms) < 3 + len(rounded):
            continue
        telling = {largest_prime(form) for form in forms}
        is_unique = all(sum(form % prime == 0 for form in forms) == 1 for prime in telling)
        if is_unique and len(telling) == len(forms) and min(telling) >= LEAST:
            chosen.append((length, telling))
    return chosen


def largest_prime(number: int) -> int:
    """The largest prime factor of a number; 1 for 1."""
    largest, divisor = 1, 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            largest, number = divisor, number // divisor
        divisor += 1
    return max(largest, number)
