"""The moments of a step at which the peak can occur, as sums over kinds of tensors.

A step has thousands of events, but only a few dozen of them are the peak for some model and some
sizes. At each of these moments, so many tensors of each kind are live: some once, and some once per
repeating block of layers. The bytes of a kind are a product of symbols (`memlab.trace.symbols`).
The calculator of a page can therefore find a peak by arithmetic, without replaying the events.

A trace has two halves: the forward and backward passes, and the update (the optimizer step). A
"pattern" is the repeating block of layers (`memlab.predict.layer_patterns`).
"""

from typing import NamedTuple

import numpy as np

from memlab.footprint import Category, Phase
from memlab.trace.allocator import MEDIUM_REQUEST
from memlab.trace.events import Alloc, Free, Marker
from memlab.trace.layered import Counts, LayeredLog
from memlab.trace.symbols import ReductionBytes, Term, factors_of
from memlab.trace.trace import PhaseTrace

# The random models with which `largest_moments` looks for peaks: symbol -> (least, most), drawn on
# a logarithmic scale. W: bytes of a workspace. T: threads of a GPU. n: tensors that are trained.
# The other symbols are sizes (`memlab.trace.symbols`, `memlab.predict.widths`).
DRAWS = 400
RANGES = {"b": (1, 128), "s": (16, 16384), "g": (1, 96), "m": (1, 8), "d": (32, 256)}
RANGES |= {"h": (256, 16384), "f": (512, 65536), "V": (1000, 260000), "n": (10, 1000)}
RANGES |= {"P": (512, 131072), "w": (64, 8192), "r": (1, 256), "W": (2**23, 2**25)}
RANGES["T"] = 2**15, 2**19
PATTERNS = (2, 128)  # how often the block of layers repeats


class Moments(NamedTuple):
    """What half a step holds at the moments that can be its peak.

    tensors: (category, bytes in symbols, bytes of an element) of each kind of tensor.
    once: how many of each kind are live at each moment in a model without any pattern of layers;
        an array of shape [moments, tensors]. Values may be negative, because this is extrapolated.
    each: how many more of each kind one pattern adds; of the same shape.
    phases: the phase of each moment.
    carried_over: [2, tensors], `once` and `each` of the tensors that outlive the half: those that
        the passes leave to the update, or the update to the passes of the next step.
    """

    tensors: list[tuple[Category, Term, int]]
    once: np.ndarray
    each: np.ndarray
    phases: list[Phase]
    carried_over: np.ndarray


def from_none(counts: Counts, patterns: int) -> Counts:
    """Counts at `patterns` patterns of layers, extrapolated to a model without any pattern."""
    return {kind: (once - patterns * each, each) for kind, (once, each) in counts.items()}


def largest_moments(half: PhaseTrace) -> list[int]:
    """The numbers of the moments of `moments_of` that are the largest for some model.

    They are found by random draws of sizes and depth, so a rare moment may be missed. Two sums
    count: all live tensors, for allocated bytes, and the live tensors with segments of their own,
    for reserved bytes.
    """
    moments = moments_of(half)
    random, chosen = np.random.default_rng(0), set()
    # Widths that are part of the structure are no symbols. The log already has their real values.
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
        # [moments, tensors] @ [tensors] -> bytes at each moment
        counts = moments.once + (patterns if half.log.blocks else 0) * moments.each
        for pool in (True, sizes >= MEDIUM_REQUEST):
            chosen.add(int((counts @ (sizes * pool)).argmax()))
    return sorted(chosen)


def moments_of(half: PhaseTrace, chosen: list[int] | None = None) -> Moments:
    """The moments of a half: the start of the measured step, and the time after each allocation.

    chosen: the numbers of the wanted moments; None is all of them. In an update, the moments count
    only what is live in addition to the tensors that were live when the update began.
    """
    # Only the passes mark the beginning of the measured step.
    is_update = Marker.RESET not in half.log.kinds
    log, (tensors, places, signs) = half.log, _changes(half)

    def levels(order: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """How many of each tensor are live after each of the asked steps: [asked, tensors]."""
        # Row i sums the changes of the steps up to the i-th asked one; then accumulate the rows.
        # Steps after the last asked one land in an extra row that nobody reads.
        rows, row_of = np.unique(asked, return_inverse=True)
        change = np.zeros((len(rows) + 1, len(tensors)), np.int32)
        row_of_step = rows.searchsorted(np.arange(len(order)))
        np.add.at(change, (row_of_step, places[order]), signs[order])
        return change.cumsum(axis=0)[row_of]

    # Count at two depths. Their difference is what one pattern adds.
    order = log.order
    deep = order if log.blocks is None else log.order_at(log.patterns + 1)
    begins, ends = Marker.UPDATE if is_update else Marker.RESET, Marker.UPDATE
    # The log holds two steps. The last mark belongs to the measured one.
    start, end = (_last(log, order, mark) for mark in (begins, ends))
    deep_start, deep_end = (_last(log, deep, mark) for mark in (begins, ends))
    allocs = np.array([type(kind) is Alloc for kind in log.kinds])
    pairs = _pairs(log)
    allocated = pairs[(pairs[:, 0] > start) & allocs[order[pairs[:, 0]]]]
    pairs = np.concatenate(([(start, deep_start)], allocated))
    pairs = pairs if chosen is None else pairs[chosen]
    # The last two rows are the counts at the start and at the end; they are cut off below.
    low, high = (
        levels(order, np.append(pairs[:, 0], (start, end))),
        levels(deep, np.append(pairs[:, 1], (deep_start, deep_end))),
    )
    left, left_more = low[-1], high[-1] - low[-1]
    if is_update:  # the passes' own tables have what was live before
        low, high = low - low[-2], high - high[-2]
    at = [log.kinds[i] for i in order[pairs[:, 0]]]
    first = Phase.STEP if is_update else Phase.FORWARD
    once, each = low[:-2], high[:-2] - low[:-2]
    # Drop kinds of tensors that are never live; the page's tables become smaller.
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
    """(kinds of tensors; the tensor that each kind of event changes; the change, 1, -1 or 0).

    Tensors of equal category, bytes and element size are one kind, whatever made them.
    """
    kinds = half.log.kinds
    tensors: dict[tuple, int] = {}
    places, signs = np.zeros(len(kinds), int), np.zeros(len(kinds), np.int32)
    for i, kind in enumerate(kinds):
        alloc = kind.alloc if type(kind) is Free else kind
        if type(alloc) is Alloc:
            tensor = alloc.category, half.term(alloc), alloc.item
            places[i] = tensors.setdefault(tensor, len(tensors))
            signs[i] = 1 if kind is alloc else -1
    return list(tensors), places, signs


def _last(log: LayeredLog, order: np.ndarray, mark: Marker) -> int:
    return int(np.flatnonzero(order == log.kinds.index(mark))[-1])


def _pairs(log: LayeredLog) -> np.ndarray:
    """(place in the log's order, matching place in the order with one pattern more) of each event.

    An event of a repeated block is listed twice: once for its own block, and once for the block
    that is added after it.
    """
    pairs, shift, begin = [], 0, 0

    def like(first: int, last: int) -> None:
        pairs.append(np.stack([np.arange(first, last), np.arange(first, last) + shift], axis=1))

    for after, block in log.blocks or ():
        if after == len(log.order):  # nothing follows that could be shifted
            break
        like(begin, after)
        begin = after
        shift += len(block)
        # The last block of a stage again, now matched with the added block. If a stage's memory
        # grows or shrinks from block to block, the other blocks lie between these two.
        like(after - len(block), after)
    like(begin, len(log.order))
    return np.concatenate(pairs)
