"""One log for any number of layers, from the logs of the same training at two or three depths.

The layers of a transformer are all alike, or repeat in a pattern. A deeper model does the same
things in the same order, only more often. For each further pattern, each stage (building, forward,
backward, every list of the optimizer step ...) has one more block of events. The blocks are found
by comparing the logs. Nothing is fitted: the log at another depth is written out event by event.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memlab.trace.events import TraceEvent
from memlab.trace.log import Log

Blocks = list[tuple[int, np.ndarray]]  # (index into an order, block that a pattern adds before it)
Counts = dict[Any, tuple[int, int]]  # key -> (count at the recorded depth, more per pattern)


@dataclass(frozen=True)
class LayeredLog:
    """A log for any number of layer patterns.

    kinds: the distinct events. order: for each event of the log with `patterns` patterns, its index
    into `kinds`; int32. blocks: (index into `order`, indices into `kinds` that each further pattern
    inserts there), in order; None if the log holds for `patterns` patterns only. weights, work: as
    in `Log`, as counts that grow with the patterns.
    """

    kinds: tuple[TraceEvent, ...]
    order: np.ndarray
    blocks: tuple[tuple[int, np.ndarray], ...] | None
    patterns: int
    weights: Counts
    work: Counts
    assumptions: tuple[str, ...]

    @classmethod
    def of(cls, logs: Sequence[Log], patterns: int) -> LayeredLog | None:
        """Combine the logs of `patterns - 1`, `patterns` and, optionally, `patterns + 1` patterns.

        A single log gives a `LayeredLog` for its own depth. Returns None if the logs do not agree
        on what a pattern adds.
        """
        numbers: dict[TraceEvent, int] = {}
        # One numbering for all logs, so that equal events are equal integers.
        orders = [
            np.array([numbers.setdefault(step, len(numbers)) for step in log.steps], np.int32)
            for log in logs
        ]
        assumptions = tuple(
            dict.fromkeys(assumption for log in logs for assumption in log.assumptions)
        )
        if len(logs) == 1:
            counted = [
                {kind: (number, 0) for kind, number in counts.items()}
                for counts in (logs[0].weights, logs[0].work)
            ]
            return cls(
                tuple(numbers), orders[0], None, patterns, counted[0], counted[1], assumptions
            )
        # With three logs, the blocks come from the deeper two, and the shallowest checks them. With
        # two, the blocks are moved to where they are in the deeper log.
        few, some, *more = orders
        blocks = growth(some, more[0]) if more else _moved(growth(few, some, seen_twice=False))
        if blocks is None or not np.array_equal(repeated(some, blocks, -1), few):
            return None
        weights = _growing(*(log.weights for log in logs))
        work = _growing(*(log.work for log in logs))
        if weights is None or work is None:
            return None
        return cls(tuple(numbers), some, tuple(blocks), patterns, weights, work, assumptions)

    def order_at(self, patterns: int) -> np.ndarray:
        """The indices into `kinds` of the log with `patterns` patterns.

        Raises ValueError if the log holds for another number of patterns only.
        """
        if self.blocks is None:
            if patterns != self.patterns:
                raise ValueError(f"the log is of {self.patterns} patterns only, not of {patterns}")
            return self.order
        return repeated(self.order, self.blocks, patterns - self.patterns)

    def counted(self, counts: Counts, patterns: int) -> Counter:
        """`weights` or `work` at `patterns` patterns."""
        more = patterns - self.patterns
        return Counter({kind: once + more * each for kind, (once, each) in counts.items()})


def _growing(few: Counter, some: Counter, *more: Counter) -> Counts | None:
    """Counts at the second depth, with the growth per pattern; None if that is not constant."""
    each = {kind: some[kind] - few[kind] for kind in {*few, *some, *itertools.chain(*more)}}
    if any(deeper[kind] - some[kind] != each[kind] for deeper in more for kind in each):
        return None
    return {kind: (some[kind], number) for kind, number in each.items()}


def _moved(blocks: Blocks | None) -> Blocks | None:
    """Blocks indexed by the shorter log, re-indexed by where they end in the longer one."""
    if blocks is None:
        return None
    ends = itertools.accumulate(len(block) for _, block in blocks)
    return [(place + end, block) for (place, block), end in zip(blocks, ends, strict=True)]


def growth(short: np.ndarray, long: np.ndarray, seen_twice: bool = True) -> Blocks | None:
    """The blocks that `long` has in addition to `short`, as (index into short, block).

    Both are walked together. Where they diverge, `long` must repeat the block that it has just
    had, while `short` goes on with what follows. If blocks of several lengths repeat, take the one
    after which both agree to the end, or else for longest. Returns None if no block explains the
    difference.

    seen_twice: False if `short` has a single pattern. What lies between two patterns is then in
    `long` once, so a block that does not repeat the one before is accepted, too.
    """
    blocks: list[tuple[int, np.ndarray]] = []
    i, j = 0, 0
    while True:
        agreed = _agreement(short[i:], long[j:])
        i, j = i + agreed, j + agreed
        if i == len(short) and j == len(long):
            return blocks
        spare = (len(long) - j) - (len(short) - i)  # events that blocks have yet to explain
        # Lengths at which the next block of `long` equals the one just before it.
        sizes = [
            p
            for p in range(1, min(spare, j) + 1)
            if np.array_equal(long[j - p : j], long[j : j + p])
        ]
        if not (sizes or seen_twice) and i < len(short):
            # A new block: it ends where `long` comes to the next event of `short`.
            sizes = [p for p in range(1, spare + 1) if long[j + p] == short[i]]
        best, size = (False, -1), None  # (both agree to the end, for how many events)
        for p in sizes:
            after = _agreement(short[i:], long[j + p :])
            ends = i + after == len(short) and j + p + after == len(long)
            if (ends, after) > best:
                best, size = (ends, after), p
        if size is None:
            return None
        blocks.append((i, long[j : j + size]))
        j += size


def _agreement(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two arrays."""
    shorter = min(len(a), len(b))
    different = a[:shorter] != b[:shorter]
    return int(different.argmax()) if different.any() else shorter


def repeated(steps: np.ndarray, blocks: Iterable[tuple[int, np.ndarray]], more: int) -> np.ndarray:
    """Insert each block `more` times; a negative number removes the block that many times."""
    pieces, start = [], 0
    for place, block in blocks:
        # To remove blocks, stop as many of their lengths before the place. `[block] * more` is then
        # empty.
        end = place if more >= 0 else max(start, place + more * len(block))
        pieces.append(steps[start:end])
        pieces += [block] * more
        start = place
    return np.concatenate([*pieces, steps[start:]])
