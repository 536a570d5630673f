"""What the calculator's script evaluates: the moments of kept traces, in few bytes."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from memlab import models
from memlab.card.step_time import PHASES
from memlab.footprint import Category, Phase
from memlab.gpus import GPU
from memlab.panels.moments import from_none, moments_of
from memlab.predict.shipped import Shipped
from memlab.predict.store import RecordedPhase
from memlab.predict.structure import structures
from memlab.predict.traces import keys_of, usual_sizes
from memlab.spec.recipe import Recipe
from memlab.trace.symbols import ReductionBytes, Term
from memlab.trace.trace import PhaseTrace
from memlab.trace.work import Work


class PackedTables:
    """The halves that are asked for, with halves, operators and terms numbered.

    Halves have much in common: what is equal is kept once, and the like beside each other, because
    gzip sees no further than 32 KiB; differences stand in place of numbers.
    """

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.operators: dict[tuple, int] = {}
        self.terms: dict[Term, int] = {}
        names = "layers", "tensors", "beside", "moments", "work", "parameters"
        self.columns: dict[str, list[Any]] = {name: [] for name in names}

    def place(self, key: str) -> int | None:
        """The number of a half; None where it is not kept."""
        if key not in self.places:
            phases: dict[str, RecordedPhase | None] = {}
            Shipped.of_memlab().read_into(phases, key)
            recorded = phases.get(key)
            if recorded is None or recorded.layers is None:
                return None
            self.places[key] = len(self.places)
            self._add(recorded)
        return self.places[key]

    def _add(self, recorded: RecordedPhase) -> None:
        categories, half = list(Category), recorded.half
        moments = moments_of(half, recorded.largest)
        changes, before = [], np.zeros((2, len(moments.tensors)))
        for phase, *now in zip(moments.phases, moments.once, moments.each, strict=True):
            changes.append([_phase(phase), *_flat(_counts(np.array(now) - before))])
            before = np.array(now)
        weights = from_none(half.log.weights, half.log.patterns)
        for name, column in {
            "layers": recorded.layers and dataclasses.astuple(recorded.layers),
            "tensors": [
                [categories.index(category), self._term(term), item]
                for category, term, item in moments.tensors
            ],
            "beside": _flat(_counts(moments.carried_over)),
            "moments": changes,
            "work": _flat(self._work(half)),
            "parameters": [
                [self._term(half.read(elements, of_model=True)), *counts, free]
                for (elements, free), counts in weights.items()
            ],
        }.items():
            self.columns[name].append(column)

    def _work(self, half: PhaseTrace) -> list[list[int]]:
        """The operators of a half by their numbers, and how often each runs."""
        alike: dict[Work, list[int]] = {}
        for work, (once, each) in from_none(half.log.work, half.log.patterns).items():
            counts = alike.setdefault(work._replace(micro_batch=0), [0, 0, 0, 0])
            further = 2 if work.micro_batch == 1 and work.phase != Phase.STEP else 0
            counts[further] += once
            counts[further + 1] += each
        rows = []
        for work, counts in alike.items():
            operator = (
                work.dtype,
                self._term(half.read(work.flops, whole=True)),
                tuple(self._term(half.read(nbytes)) for nbytes in work.result),
                tuple(self._term(half.read(nbytes)) for nbytes in work.moved),
                work.lists,
                self._term(half.read(work.elements)),
                _phase(work.phase),
                int(work.recomputed),
            )
            rows.append([self.operators.setdefault(operator, len(self.operators)), *counts])
        return rows

    def _term(self, term: Term) -> int:
        """The place of a term, after those that it is made of; -1 of nothing."""
        for factor, _ in term.powers:
            if isinstance(factor, ReductionBytes):
                for side in factor:
                    self._term(side)
        return self.terms.setdefault(term, len(self.terms)) if term.constant else -1

    def _encoded(self, term: Term) -> list:
        """A term: its number, its powers, and the places of the rows and columns of a sum."""
        encoded: list[Any] = [term.constant / term.divisor, {}]
        for factor, exponent in term.powers:
            if isinstance(factor, ReductionBytes):
                encoded.append([self._term(side) for side in factor])
            else:
                encoded[1][factor] = exponent
        return encoded

    def tables(self) -> dict:
        terms = [self._encoded(term) for term in self.terms]
        alike = sorted(self.places.values(), key=lambda place: self._text("tensors", place))
        halves = {name: self._encoded_once(name, alike) for name in self.columns}
        return {"terms": terms, "operators": list(self.operators), "halves": halves}

    def _encoded_once(self, name: str, order: list[int]) -> dict[str, list]:
        """What there is in a column, in an order of halves, and which of it each half has."""
        texts = [self._text(name, place) for place in order]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        of = [numbers[self._text(name, place)] for place in self.places.values()]
        return {"rows": list(map(json.loads, numbers)), "of": of}

    def _text(self, name: str, place: int) -> str:
        return json.dumps(self.columns[name][place], separators=(",", ":"))


def has_traces(recipe: Recipe, card: GPU) -> bool:
    """Whether the traces that the calculator needs came with memlab.

    The page has those of texts below a window of attention only.
    """
    window = getattr(models.settings(recipe.model), "sliding_window", None)
    if window and recipe.seq_len >= window:
        return False
    usual = usual_sizes(recipe)
    keys = keys_of(usual, *next(structures(usual, card, ignore_small_tensors=True)))
    return all(map(Shipped.of_memlab().has_half, keys))


def _counts(counts: np.ndarray) -> list[tuple[int, ...]]:
    """(tensor, once, each) of those that there are, of two rows."""
    return [(int(t), *map(int, counts[:, t])) for t in np.flatnonzero(counts.any(axis=0))]


def _flat(rows: Iterable[Any]) -> list[int]:
    """Rows as one list, sorted; each begins with the distance from the one before."""
    flat, place = [], 0
    for first, *rest in sorted(rows):
        flat += [first - place, *rest]
        place = first
    return flat


def _phase(name: Phase) -> int:
    return PHASES.index(name)
