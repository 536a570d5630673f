"""Logs of one training at two or three depths, as one log for every depth.

The layers of a transformer are alike, or repeat in a pattern, so a deeper model does the same
things in the same order, only more often: each stage (building, forward, backward, every list of
the optimizer step ...) has one block of events more for each pattern more. The blocks are found by
comparing the logs. Nothing is fitted: the log at another depth is written out event by event.
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

Blocks = list[tuple[int, np.ndarray]]  # (place in an order, what is there once more per pattern)
Counts = dict[Any, tuple[int, int]]  # what is counted -> (once, more with each pattern)


@dataclass(frozen=True)
class LayeredLog:
    """A log for any number of patterns of layers.

    kinds: the steps that differ. order: a place among the kinds for each step of the log with
    `patterns` patterns. blocks: (place in order, kinds of a pattern more), in order. weights, work:
    as in `Log`. Where blocks are None it is of `patterns` patterns only.
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
        """Of the logs with one pattern less than `patterns`, with so many, and perhaps one more.

        All must agree. Or of one log alone, for its own depth. None where the logs do not agree.
        """
        numbers: dict[TraceEvent, int] = {}
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
        """The kinds of the log with so many patterns. Raises ValueError where there is none."""
        if self.blocks is None:
            if patterns != self.patterns:
                raise ValueError(f"the log is of {self.patterns} patterns only, not of {patterns}")
            return self.order
        return repeated(self.order, self.blocks, patterns - self.patterns)

    def counted(self, counts: Counts, patterns: int) -> Counter:
        """Weights or work with so many patterns."""
        more = patterns - self.patterns
        return Counter({kind: once + more * each for kind, (once, each) in counts.items()})


def _growing(few: Counter, some: Counter, *more: Counter) -> Counts | None:
    """What is counted, at the second depth and with each pattern more; None if it is uneven."""
    each = {kind: some[kind] - few[kind] for kind in {*few, *some, *itertools.chain(*more)}}
    if any(deeper[kind] - some[kind] != each[kind] for deeper in more for kind in each):
        return None
    return {kind: (some[kind], number) for kind, number in each.items()}


def _moved(blocks: Blocks | None) -> Blocks | None:
    """Blocks by their places in the shorter log, by those after them in the longer one."""
    if blocks is None:
        return None
    ends = itertools.accumulate(len(block) for _, block in blocks)
    return [(place + end, block) for (place, block), end in zip(blocks, ends, strict=True)]


def growth(short: np.ndarray, long: np.ndarray, seen_twice: bool = True) -> Blocks | None:
    """What `long` has more than `short`: (place in short, block), each block a repetition.

    Both are walked together. Where they part, `long` goes on with a block that it has just had
    and `short` with what comes after; of several such blocks it is the one after which they
    agree to the end, or else longest. None if there is no such block.

    seen_twice: False where `short` has one pattern, so that what lies between two patterns stands
    in `long` once: a block that it has not had before is taken, too.
    """
    blocks: list[tuple[int, np.ndarray]] = []
    i, j = 0, 0
    while True:
        agreed = _agreement(short[i:], long[j:])
        i, j = i + agreed, j + agreed
        if i == len(short) and j == len(long):
            return blocks
        spare = (len(long) - j) - (len(short) - i)
        sizes = [
            p
            for p in range(1, min(spare, j) + 1)
            if np.array_equal(long[j - p : j], long[j : j + p])
        ]
        if not (sizes or seen_twice) and i < len(short):
            sizes = [p for p in range(1, spare + 1) if long[j + p] == short[i]]
        best, size = (False, -1), None
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
    """How many first elements two arrays have in common."""
    shorter = min(len(a), len(b))
    different = a[:shorter] != b[:shorter]
    return int(different.argmax()) if different.any() else shorter


def repeated(steps: np.ndarray, blocks: Iterable[tuple[int, np.ndarray]], more: int) -> np.ndarray:
    """`steps` with each block `more` times more often; a negative number takes blocks away."""
    pieces, start = [], 0
    for place, block in blocks:
        end = place if more >= 0 else max(start, place + more * len(block))
        pieces.append(steps[start:end])
        pieces += [block] * more
        start = place
    return np.concatenate([*pieces, steps[start:]])
