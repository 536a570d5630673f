"""One trace for all sizes: what a training does to memory, with sizes as symbols.

A `Trace` holds the log of a training at sizes that can be told apart (`memlab.trace.symbols`). `at`
puts other sizes in, in milliseconds, and an allocator serves the log like any other.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memlab.footprint import Category
from memlab.trace.allocator import MIN_BLOCK
from memlab.trace.events import Alloc, Free, Marker, TraceEvent
from memlab.trace.layered import LayeredLog
from memlab.trace.log import Event, Log, named, trained
from memlab.trace.symbols import ReductionBytes, Symbols, Term, factors_of

# (name of the storage, place of the kind) of every step.
Steps = list[tuple[object, int]]

# What has the sizes of weights, whatever the batch.
OF_MODEL = {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES}


class PhaseTrace:
    """The passes or the updates of a training, for all sizes and depths.

    log: at `sizes`, the chosen values of the symbols; None where the log has
    concrete sizes. batches:
    its micro-batches in a step. workspace: bytes of the card's on which it was recorded.
    """

    def __init__(
        self, log: LayeredLog, sizes: Mapping[str, int] | None, batches: int, workspace: int
    ):
        self.log, self.batches, self.workspace = log, batches, workspace
        self.symbols = Symbols(sizes) if sizes else None

    def read(self, number: int, **known: bool) -> Term:
        """A number at the chosen sizes, as a product of symbols. known: as for `Symbols.term`."""
        return self.symbols.term(number, **known) if self.symbols else Term(number, 1, ())

    def term(self, birth: Alloc) -> Term:
        """The bytes of what is born, in symbols.

        `W` is a workspace, `T` the threads that the card holds, `n` the tensors that train.
        """
        if birth.reduction and self.symbols:
            return Term(1, 1, ((ReductionBytes(*map(self.read, birth.reduction)), 1),))
        if birth.nbytes < 0:
            return Term(-birth.nbytes, 1, (("n", 1),))
        if birth.category == Category.WORKSPACES:
            is_of_card = birth.nbytes == self.workspace
            return Term(1, 1, (("W", 1),)) if is_of_card else Term(birth.nbytes, 1, ())
        return self.read(birth.nbytes, of_model=birth.category in OF_MODEL)

    def factors(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The factors of terms at these sizes, and at the chosen ones where these have none."""
        chosen = self.symbols.sizes if self.symbols else {"s": 1}
        return factors_of({"W": self.workspace} | chosen | dict(sizes))

    def number(self, sizes: Mapping[str, int]) -> Callable[..., int]:
        """The function from a number at the chosen sizes to the one at these."""
        factors = self.factors(sizes)
        return lambda chosen, **known: self.read(chosen, **known).at(factors)

    def bytes_at(self, sizes: Mapping[str, int], norms: int) -> list[int | None]:
        """The bytes of each kind of step that is a birth, else None. norms: tensors that train."""
        factors = self.factors(sizes) | {"n": norms}
        return [
            self.term(kind).at(factors, kind.item) if type(kind) is Alloc else None
            for kind in self.log.kinds
        ]

    def steps(self, patterns: int, batches: int) -> Steps:
        """(name of the storage, place of the kind) of every step; None for what is no storage."""
        order = self.log.order_at(patterns).tolist()
        kinds = self.log.kinds
        names = (name for name, _ in named(kinds[i] for i in order))
        steps = list(zip(names, order, strict=True))
        return self._with_batches(steps, batches) if batches > self.batches else steps

    def _with_batches(self, steps: Steps, batches: int) -> Steps:
        """With the tokens of so many micro-batches, which come before the first step."""
        kinds, more = self.log.kinds, batches - self.batches
        given = [i for i, (_, kind) in enumerate(steps) if is_given(kinds[kind])]
        start, end = (given[i] + 1 for i in (-1 - len(given) // self.batches, -1))
        born = [name for name, kind in steps[:end] if type(kinds[kind]) is Alloc]
        last = [name for name, kind in steps[start:end] if type(kinds[kind]) is Alloc]
        # What was made on the way to a batch may die on the way to the next.
        before = dict(zip(born[-2 * len(last) : -len(last)], last, strict=True))
        added = []
        for copy in range(more):
            for name, kind in steps[start:end]:
                if name in last:
                    name = name, copy
                elif name in before:
                    name = (before[name], copy - 1) if copy else before[name]
                added.append((name, kind))
        rest = [((n, more - 1) if n in last else n, kind) for n, kind in steps[end:]]
        return steps[:end] + added + rest


class Depth(NamedTuple):
    """How often a trace repeats: patterns of layers, and micro-batches of a step."""

    patterns: int
    batches: int


class Trace:
    """What a training does to memory at all sizes at which the same events happen."""

    def __init__(self, passed: PhaseTrace, updated: PhaseTrace):
        self.passed, self.updated = passed, updated
        self._joined = functools.lru_cache(maxsize=2)(self._join)
        self._changes = functools.lru_cache(maxsize=2)(self._find_changes)

    def at(self, sizes: Mapping[str, int], depth: Depth) -> Log:
        """The log at these sizes and this depth."""
        halves = self.passed, self.updated
        weights = self._weights(sizes, depth.patterns)
        work: Counter = Counter()
        kinds: list[TraceEvent] = []
        for half in halves:
            number = half.number(sizes)
            for operator, times in half.log.counted(half.log.work, depth.patterns).items():
                work[operator.sized(number)] += times
            nbytes = half.bytes_at(sizes, trained(weights))
            kinds += [
                kind._replace(nbytes=n) if type(kind) is Alloc and n is not None else kind
                for kind, n in zip(half.log.kinds, nbytes, strict=True)
            ]
        assumptions = dict.fromkeys(
            assumption for half in halves for assumption in half.log.assumptions
        )
        steps = functools.partial(self._joined, depth)
        return SizedLog([], weights, tuple(assumptions), work, kinds, steps)

    def peak_allocated(self, sizes: Mapping[str, int], depth: Depth) -> int:
        """The most bytes of blocks in the second step, without writing the log out.

        What more micro-batches than were recorded add is their tokens, which stay all the while.
        """
        norms = trained(self._weights(sizes, depth.patterns))
        halves = self.passed, self.updated
        nbytes = [n or 0 for half in halves for n in half.bytes_at(sizes, norms)]
        blocks = -(-np.array(nbytes) // MIN_BLOCK) * MIN_BLOCK
        which, signs, start, given = self._changes(depth.patterns)
        now = np.cumsum(blocks[which] * signs)
        more = max(0, depth.batches - self.passed.batches) * blocks[given].sum()
        return int(now[start:].max() + more // self.passed.batches)

    def _find_changes(self, patterns: int) -> tuple[np.ndarray, np.ndarray, int, list[int]]:
        """The kinds that come and go, 1 or -1 of each, the last before RESET, kinds of tokens."""
        kinds = [*self.passed.log.kinds, *self.updated.log.kinds]
        places: dict[TraceEvent, int] = {
            kind: place for place, kind in enumerate(kinds) if type(kind) is Alloc
        }
        signs = np.array([(type(kind) is Alloc) - (type(kind) is Free) for kind in kinds])
        of = [places.get(getattr(kind, "birth", kind), 0) for kind in kinds]
        order = [place for _, place in self._joined(Depth(patterns, self.passed.batches))]
        (start,) = np.flatnonzero([kinds[place] is Marker.RESET for place in order])
        tokens = [place for place in order if is_given(kinds[place])]
        return np.array(of)[order], signs[order], int(start), tokens

    def _weights(self, sizes: Mapping[str, int], patterns: int) -> Counter:
        """As of a Log, at these sizes."""
        number = self.passed.number(sizes)
        weights: Counter = Counter()
        counted = self.passed.log.counted(self.passed.log.weights, patterns)
        for (elements, free), times in counted.items():
            weights[number(elements, of_model=True), free] += times
        return weights

    def _join(self, depth: Depth) -> Steps:
        """The steps of both halves: an update comes where the gradients of a pass are there."""
        shift, kinds = len(self.passed.log.kinds), self.updated.log.kinds
        updates: list[Steps] = [[]]
        for name, kind in self.updated.steps(depth.patterns, 0):
            if kinds[kind] is Marker.UPDATED:
                updates.append([])
            elif kinds[kind] is not Marker.UPDATE:
                updates[-1].append((("update", name), shift + kind))
        waiting, joined = iter(updates), []
        for name, kind in self.passed.steps(depth.patterns, depth.batches):
            joined.append((name, kind))
            if self.passed.log.kinds[kind] is Marker.UPDATE:
                joined += next(waiting)
        return joined


@dataclass(frozen=True)
class SizedLog(Log):
    """A log in which every storage has the bytes of other sizes.

    kinds: as they are now; those that have become alike are still told apart by their storages'
    names. A buffer of no bytes is not taken at these sizes. joined: gives (name, place among the
    kinds) of each step.
    """

    kinds: list[TraceEvent] = field(default_factory=list)
    joined: Callable[[], Steps] = list

    def events(self) -> Iterator[Event]:
        """As `Log.events`."""
        kinds, joined = self.kinds, self.joined()
        none = {i for i, kind in enumerate(kinds) if type(kind) is Alloc and not kind.nbytes}
        untaken = {name for name, i in joined if i in none} if none else none
        return ((name, kinds[i]) for name, i in joined if name not in untaken)


def is_given(step: TraceEvent) -> bool:
    """Whether it is the birth of tokens or labels of a micro-batch."""
    return type(step) is Alloc and step.category == Category.INPUTS
