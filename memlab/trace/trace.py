"""One trace for all sizes: the allocation log of a training, with sizes as symbols.

A `Trace` holds a log that was recorded at sizes with distinct prime factors
(`memlab.trace.symbols`) and for any depth (`memlab.trace.layered`). `Trace.at` gives the log at
other sizes in milliseconds, and an allocator replays it like any other.

Known limitation: a trace holds for sizes at which the same events happen
(`memlab.predict.structure.TraceDomain`).
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

# (name of the storage, index into the kinds) of every event; the name is None for markers.
Steps = list[tuple[object, int]]

# Categories whose sizes depend on the weights alone, not on batch or length.
OF_MODEL = {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES}


class PhaseTrace:
    """The forward and backward passes, or the optimizer steps, of a training, for all sizes.

    log: recorded at `sizes`. sizes: the chosen values of the symbols; None if the log holds for its
    own sizes only. batches: micro-batches per step of the log. workspace: bytes of a cuBLAS
    workspace on the GPU of the recording.
    """

    def __init__(
        self, log: LayeredLog, sizes: Mapping[str, int] | None, batches: int, workspace: int
    ):
        self.log, self.batches, self.workspace = log, batches, workspace
        self.symbols = Symbols(sizes) if sizes else None

    def read(self, number: int, **known: bool) -> Term:
        """A number at the chosen sizes as a term; known: keywords of `Symbols.term`."""
        return self.symbols.term(number, **known) if self.symbols else Term(number, 1, ())

    def term(self, alloc: Alloc) -> Term:
        """The bytes of an allocation as a term.

        Besides sizes, its symbols are `W` (bytes of a cuBLAS workspace), `T` (threads that the GPU
        keeps resident) and `n` (trained tensors).
        """
        if alloc.reduction and self.symbols:
            return Term(1, 1, ((ReductionBytes(*map(self.read, alloc.reduction)), 1),))
        if alloc.nbytes < 0:  # the norms of all trained weights: `NORMS` in memlab.trace.log
            return Term(-alloc.nbytes, 1, (("n", 1),))
        if alloc.category == Category.WORKSPACES:
            # cuBLAS's depends on the GPU; others, such as cublasLt's, are constant.
            is_of_card = alloc.nbytes == self.workspace
            return Term(1, 1, (("W", 1),)) if is_of_card else Term(alloc.nbytes, 1, ())
        return self.read(alloc.nbytes, of_model=alloc.category in OF_MODEL)

    def factors(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """All factors that terms may have; a size that is not given has its chosen value."""
        chosen = self.symbols.sizes if self.symbols else {"s": 1}
        return factors_of({"W": self.workspace} | chosen | dict(sizes))

    def number(self, sizes: Mapping[str, int]) -> Callable[..., int]:
        """A function that maps a number at the chosen sizes to the number at these sizes."""
        factors = self.factors(sizes)
        return lambda chosen, **known: self.read(chosen, **known).at(factors)

    def bytes_at(self, sizes: Mapping[str, int], norms: int) -> list[int | None]:
        """The bytes of each kind that is an allocation, else None; norms: trained tensors."""
        factors = self.factors(sizes) | {"n": norms}
        return [
            self.term(kind).at(factors, kind.item) if type(kind) is Alloc else None
            for kind in self.log.kinds
        ]

    def steps(self, patterns: int, batches: int) -> Steps:
        """Every event at this depth: (name of its storage, None for markers; index of its kind)."""
        order = self.log.order_at(patterns).tolist()
        kinds = self.log.kinds
        names = (name for name, _ in named(kinds[i] for i in order))
        steps = list(zip(names, order, strict=True))
        return self._with_batches(steps, batches) if batches > self.batches else steps

    def _with_batches(self, steps: Steps, batches: int) -> Steps:
        """The events with the tokens of `batches` micro-batches.

        All tokens are allocated before the first step, so the log grows in a single place. There,
        the events of the last recorded micro-batch's tokens are repeated.
        """
        kinds, more = self.log.kinds, batches - self.batches
        given = [i for i, (_, kind) in enumerate(steps) if is_given(kinds[kind])]
        # From the end of the last but one micro-batch's tokens to the end of the last one's.
        start, end = (given[i] + 1 for i in (-1 - len(given) // self.batches, -1))
        allocated = [name for name, kind in steps[:end] if type(kinds[kind]) is Alloc]
        last = [name for name, kind in steps[start:end] if type(kinds[kind]) is Alloc]
        # A temporary tensor of one micro-batch may be freed while the next one is made. `before`
        # maps the storages of the last but one micro-batch to those of the last.
        before = dict(zip(allocated[-2 * len(last) : -len(last)], last, strict=True))
        added = []
        for copy in range(more):
            for name, kind in steps[start:end]:
                if name in last:
                    name = name, copy
                # A free of the micro-batch before: in copy 0, that is the last recorded one.
                elif name in before:
                    name = (before[name], copy - 1) if copy else before[name]
                added.append((name, kind))
        # After the copies, frees of the last micro-batch's storages are those of the last copy.
        rest = [((n, more - 1) if n in last else n, kind) for n, kind in steps[end:]]
        return steps[:end] + added + rest


class Depth(NamedTuple):
    """How often the trace repeats: layer patterns, and micro-batches of a step."""

    patterns: int
    batches: int


class Trace:
    """The log of a training at all sizes at which the same events happen.

    passed: its forward and backward passes. updated: its optimizer steps.
    """

    def __init__(self, passed: PhaseTrace, updated: PhaseTrace):
        self.passed, self.updated = passed, updated
        # Caches of the instance: both depend on the depth only, and a search asks for many sizes.
        self._joined = functools.lru_cache(maxsize=2)(self._join)
        self._changes = functools.lru_cache(maxsize=2)(self._find_changes)

    def at(self, sizes: Mapping[str, int], depth: Depth) -> Log:
        """The log at these sizes and this depth; its events are made as they are iterated over."""
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
        """The peak of requested bytes, rounded up to blocks, in the second step.

        As `memlab.trace.log.peak_allocated` of `at`, without writing the log out. Micro-batches
        beyond the recorded ones only add their tokens, which stay allocated throughout.
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
        """Arrays over the events, to sum bytes at all moments at once, and where to look.

        (index of the allocation's kind, 1 or -1 or 0 for a marker, index of RESET, kinds of
        tokens).
        """
        kinds = [*self.passed.log.kinds, *self.updated.log.kinds]
        places: dict[TraceEvent, int] = {
            kind: place for place, kind in enumerate(kinds) if type(kind) is Alloc
        }
        signs = np.array([(type(kind) is Alloc) - (type(kind) is Free) for kind in kinds])
        of = [places.get(getattr(kind, "alloc", kind), 0) for kind in kinds]
        order = [place for _, place in self._joined(Depth(patterns, self.passed.batches))]
        (start,) = np.flatnonzero([kinds[place] is Marker.RESET for place in order])
        tokens = [place for place in order if is_given(kinds[place])]
        return np.array(of)[order], signs[order], int(start), tokens

    def _weights(self, sizes: Mapping[str, int], patterns: int) -> Counter:
        """`Log.weights` at these sizes."""
        number = self.passed.number(sizes)
        weights: Counter = Counter()
        counted = self.passed.log.counted(self.passed.log.weights, patterns)
        for (elements, free), times in counted.items():
            weights[number(elements, of_model=True), free] += times
        return weights

    def _join(self, depth: Depth) -> Steps:
        """The events of both halves: an optimizer step is inserted at each UPDATE of the passes.

        The kinds of the optimizer steps are numbered after those of the passes.
        """
        shift, kinds = len(self.passed.log.kinds), self.updated.log.kinds
        # Split at each UPDATED marker, with one entry for each step.
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
    """A log at other sizes than it was recorded at; `steps` is empty, and `events` has all.

    kinds: the kinds of events at these sizes. Some may have become equal, so a `Free` no longer
    identifies its storage, and the name does. An allocation of 0 bytes does not happen at these
    sizes. joined: returns (name of the storage, index into `kinds`) of each event.
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
    """Whether an event allocates the tokens or labels of a micro-batch."""
    return type(step) is Alloc and step.category == Category.INPUTS
