"""The moments of a training at which a peak can be, as sums over kinds of tensors.

Of the events of a step a few dozen are the largest for some model and some sizes. What is there at
one of these is so many tensors of every kind, some once and some with each layer, and the bytes of
a kind are a product of symbols (`memlab.trace.symbols`): a peak is arithmetic then, without a
replay of the events.
"""

from typing import NamedTuple

import numpy as np

from memlab.footprint import Category, Phase
from memlab.trace.allocator import MEDIUM_REQUEST
from memlab.trace.events import Alloc, Free, Marker
from memlab.trace.layered import Counts, LayeredLog
from memlab.trace.symbols import ReductionBytes, Term, factors_of
from memlab.trace.trace import PhaseTrace

# Models that peaks are looked for with: sizes from (least, most), W bytes of a workspace, T threads
# of a card, n tensors that train.
DRAWS = 400
RANGES = {"b": (1, 128), "s": (16, 16384), "g": (1, 96), "m": (1, 8), "d": (32, 256)}
RANGES |= {"h": (256, 16384), "f": (512, 65536), "V": (1000, 260000), "n": (10, 1000)}
RANGES |= {"P": (512, 131072), "w": (64, 8192), "r": (1, 256), "W": (2**23, 2**25)}
RANGES["T"] = 2**15, 2**19
PATTERNS = (2, 128)  # of layers


class Moments(NamedTuple):
    """What a half of a training holds when it holds most.

    tensors: (category, bytes in symbols, bytes of an element) of each kind. once, each: how many of
    them there are at each moment, an array [moments, tensors] without any pattern of layers and one
    of what a pattern adds. phases: of the moments. carried_over: [2, tensors], once and each, of
    what the passes leave to the update, or of what an update leaves to the passes.
    """

    tensors: list[tuple[Category, Term, int]]
    once: np.ndarray
    each: np.ndarray
    phases: list[Phase]
    carried_over: np.ndarray


def from_none(counts: Counts, patterns: int) -> Counts:
    """Counts at so many patterns of layers, as counts without any."""
    return {kind: (once - patterns * each, each) for kind, (once, each) in counts.items()}


def largest_moments(half: PhaseTrace) -> list[int]:
    """Which moments of a half are the largest for some model, among those of `moments_of`.

    Of all tensors, for the peak, and of those with segments of their own, for what is reserved.
    """
    moments = moments_of(half)
    random, chosen = np.random.default_rng(0), set()
    # Of widths that belong to the structure the chosen ones are the real ones.
    widths = half.symbols.sizes if half.symbols else {}
    sums = any(
        isinstance(name, ReductionBytes)
        for _, term, _ in moments.tensors
        for name, _ in term.powers
    )
    others = "nWT" if sums else "nW"
    ranges = {name: ends for name, ends in RANGES.items() if name in widths or name in others}
    for _ in range(DRAWS):
        drawn = {n: float(np.exp(random.uniform(*np.log(ends)))) for n, ends in ranges.items()}
        factors = factors_of({"s": 1} | drawn)
        sizes = np.array([term.times(factors) / term.divisor for _, term, _ in moments.tensors])
        patterns = float(np.exp(random.uniform(*np.log(PATTERNS))))
        counts = moments.once + (patterns if half.log.blocks else 0) * moments.each
        for pool in (True, sizes >= MEDIUM_REQUEST):
            chosen.add(int((counts @ (sizes * pool)).argmax()))
    return sorted(chosen)


def moments_of(half: PhaseTrace, chosen: list[int] | None = None) -> Moments:
    """The moments of a half at the start of the measured stretch and after each birth.

    chosen: the numbers of those that are wanted, by themselves all. Moments of the updates count
    what is there beyond what is there when one begins.
    """
    is_update = Marker.RESET not in half.log.kinds
    log, (tensors, places, signs) = half.log, _changes(half)

    def levels(order: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """How many there are of each tensor after each of the places that are asked for."""
        rows, row_of = np.unique(asked, return_inverse=True)
        change = np.zeros((len(rows) + 1, len(tensors)), np.int32)
        row_of_step = rows.searchsorted(np.arange(len(order)))
        np.add.at(change, (row_of_step, places[order]), signs[order])
        return change.cumsum(axis=0)[row_of]

    order = log.order
    deep = order if log.blocks is None else log.order_at(log.patterns + 1)
    begins, ends = Marker.UPDATE if is_update else Marker.RESET, Marker.UPDATE
    start, end = (_last(log, order, mark) for mark in (begins, ends))
    deep_start, deep_end = (_last(log, deep, mark) for mark in (begins, ends))
    births = np.array([type(kind) is Alloc for kind in log.kinds])
    pairs = _pairs(log)
    born = pairs[(pairs[:, 0] > start) & births[order[pairs[:, 0]]]]
    pairs = np.concatenate(([(start, deep_start)], born))
    pairs = pairs if chosen is None else pairs[chosen]
    low, high = (
        levels(order, np.append(pairs[:, 0], (start, end))),
        levels(deep, np.append(pairs[:, 1], (deep_start, deep_end))),
    )
    left, left_more = low[-1], high[-1] - low[-1]
    if is_update:
        low, high = low - low[-2], high - high[-2]
    at = [log.kinds[i] for i in order[pairs[:, 0]]]
    first = Phase.STEP if is_update else Phase.FORWARD
    once, each = low[:-2], high[:-2] - low[:-2]
    used = (once != 0).any(0) | (each != 0).any(0) | (left != 0) | (left_more != 0)
    carried_over = np.array([left - log.patterns * left_more, left_more])
    return Moments(
        [tensor for tensor, there in zip(tensors, used, strict=True) if there],
        (once - log.patterns * each)[:, used],
        each[:, used],
        [event.phase if type(event) is Alloc else first for event in at],
        carried_over[:, used],
    )


def _changes(half: PhaseTrace) -> tuple[list, np.ndarray, np.ndarray]:
    """The kinds of tensors; for each kind of step which of them it changes, and by 1 or -1."""
    kinds = half.log.kinds
    tensors: dict[tuple, int] = {}
    places, signs = np.zeros(len(kinds), int), np.zeros(len(kinds), np.int32)
    for i, kind in enumerate(kinds):
        birth = kind.birth if type(kind) is Free else kind
        if type(birth) is Alloc:
            tensor = birth.category, half.term(birth), birth.item
            places[i] = tensors.setdefault(tensor, len(tensors))
            signs[i] = 1 if kind is birth else -1
    return list(tensors), places, signs


def _last(log: LayeredLog, order: np.ndarray, mark: Marker) -> int:
    return int(np.flatnonzero(order == log.kinds.index(mark))[-1])


def _pairs(log: LayeredLog) -> np.ndarray:
    """(place in the log's order, the like place in that of a pattern more) of every event."""
    pairs, shift, begin = [], 0, 0

    def like(first: int, last: int) -> None:
        pairs.append(np.stack([np.arange(first, last), np.arange(first, last) + shift], axis=1))

    for after, block in log.blocks or ():
        if after == len(log.order):
            break
        like(begin, after)
        begin = after
        shift += len(block)
        # The last of a stage's blocks; the others, when they differ, lie in between.
        like(after - len(block), after)
    like(begin, len(log.order))
    return np.concatenate(pairs)
