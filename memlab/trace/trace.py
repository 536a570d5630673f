"""One trace for all sizes: what a training does to memory, with sizes as symbols.

A `Trace` holds the log of a training at sizes that can be told apart (`memlab.trace.symbols`). `at`
puts other sizes in, in milliseconds, and an allocator serves the log like any other.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from memlab.footprint import Category
from memlab.trace.allocator import MIN_BLOCK
from memlab.trace.events import Birth, Death, Mark, Step
from memlab.trace.log import Event, Log, trained
from memlab.trace.symbols import Symbols, factors_of
from memlab.units import round_up


@dataclass(frozen=True)
class _Sized(Log):
    """A log in which every storage has the bytes of other sizes.

    known: (name of the storage or None, step, place among the births or -1). births: as they are
    now; those that have become alike are still told apart by their storages' names.
    """

    known: list[tuple[object, Step, int]] = field(default_factory=list)
    births: list[Birth] = field(default_factory=list)

    def events(self) -> Iterator[Event]:
        """As `Log.events`."""
        births = self.births
        return ((name, births[i] if i >= 0 else step) for name, step, i in self.known)


class Trace:
    """What a training does to memory at all sizes at which the same events happen.

    log: at `sizes`, the chosen values of the symbols, and over so many micro-batches of a step. Of
    more of them the tokens of more are there, from before the first step on, and nothing else.
    """

    def __init__(self, log: Log, sizes: Mapping[str, int], accumulation: int):
        self.log, self.symbols, self.accumulation = log, Symbols(sizes), accumulation
        self._places: dict[Birth, int] = {}
        self._events = []
        for number, step in log.events():
            place = -1
            if type(step) is Birth:  # as it is logged: norms have the bytes of one
                place = self._places.setdefault(log.steps[number], len(self._places))
            self._events.append((number, step, place))

    def at(self, sizes: Mapping[str, int], accumulation: int) -> Log:
        """The log at these sizes, over so many micro-batches."""
        factors = factors_of(self.symbols.sizes | dict(sizes))

        def sized(number: int) -> int:
            return self.symbols.term(number).at(factors)

        weights = Counter()
        for (elements, free), times in self.log.weights.items():
            weights[sized(elements), free] += times
        births = [
            birth._replace(nbytes=nbytes)
            for birth, nbytes in zip(self._places, self._bytes(sized), strict=True)
        ]
        work = Counter()
        for one, times in self.log.work.items():
            work[one.sized(sized)] += times
        known = self._with_batches(accumulation)
        return _Sized(self.log.steps, weights, self.log.assumptions, work, known, births)

    def least(self, sizes: Mapping[str, int], accumulation: int) -> int:
        """Bytes below which no allocator can serve these sizes, in a fraction of a replay's time.

        The most that the second step has allocated at once, each tensor in a block of its own size.
        """
        factors = factors_of(self.symbols.sizes | dict(sizes))
        sized = self._bytes(lambda number: self.symbols.term(number).at(factors))
        blocks = round_up(np.array(sized), MIN_BLOCK)
        changes, start, given = self._changes
        most = int((changes[:, 1] * blocks[changes[:, 0]]).cumsum()[start:].max())
        more = accumulation - self.accumulation
        return most + int(blocks[given].sum()) * more // self.accumulation

    def _bytes(self, sized) -> list[int]:
        """The bytes of each birth that differs from the others."""
        norms = trained(self.log.weights)
        return [
            birth.nbytes
            if birth.category == Category.WORKSPACES
            else sized(birth.nbytes)
            if birth.nbytes >= 0
            else -birth.nbytes * norms
            for birth in self._places
        ]

    def _with_batches(self, accumulation: int) -> list:
        """The events with the tokens of so many micro-batches, which come before the first step."""
        events, more = self._events, accumulation - self.accumulation
        if not more:
            return events
        given = [i for i, (_, step, _) in enumerate(events) if _is_given(step)]
        start, end = (given[i] + 1 for i in (-1 - len(given) // self.accumulation, -1))
        born = [name for name, step, _ in events[:end] if type(step) is Birth]
        last = [name for name, step, _ in events[start:end] if type(step) is Birth]
        # What was made on the way to a batch may die on the way to the next.
        before = dict(zip(born[-2 * len(last) : -len(last)], last, strict=True))
        added = []
        for copy in range(more):
            for name, *rest in events[start:end]:
                if name in last:
                    name = name, copy
                elif name in before:
                    name = (before[name], copy - 1) if copy else before[name]
                added.append((name, *rest))
        rest = [((name, more - 1) if name in last else name, *rest) for name, *rest in events[end:]]
        return events[:end] + added + rest

    @functools.cached_property
    def _changes(self) -> tuple[np.ndarray, int, list[int]]:
        """([whose bytes come or go, 1 or -1] of each change, where the second step begins, which
        bytes are those of tokens)."""
        places, changes, start = {}, [], 0
        for number, step, place in self._events:
            if type(step) is Birth:
                places[number] = place
                changes.append((place, 1))
            elif type(step) is Death:
                changes.append((places[number], -1))
            elif step is Mark.RESET:
                start = len(changes)
        given = [place for _, step, place in self._events if _is_given(step)]
        return np.array(changes), start, given


def _is_given(step: Step) -> bool:
    """Whether it is the birth of tokens or labels of a micro-batch."""
    return type(step) is Birth and step.category == Category.INPUTS
