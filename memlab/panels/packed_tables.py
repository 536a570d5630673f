"""The tables that the calculator's script evaluates: moments and work of traces, in few bytes.

The script in assets/formula.js reads the layout that is written here. A trace has two halves, the
passes (forward and backward) and the update (optimizer step); each is one row of the tables.
"""

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
    """The halves of traces that a page needs, with halves, operators and terms numbered.

    The tables are packed for gzip, whose window is 32 KiB. Equal rows are stored once, and similar
    rows next to each other. Sorted numbers are stored as differences.
    """

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.operators: dict[tuple, int] = {}
        self.terms: dict[Term, int] = {}
        # Column -> its value for each half. "beside" is what outlives the half (`carried_over`).
        names = "layers", "tensors", "beside", "moments", "work", "parameters"
        self.columns: dict[str, list[Any]] = {name: [] for name in names}

    def place(self, key: str) -> int | None:
        """The number of a half, which is added if it is new; None if no trace is stored for it."""
        if key not in self.places:
            phases: dict[str, RecordedPhase | None] = {}
            Shipped.of_memlab().read_into(phases, key)
            recorded = phases.get(key)
            # Without `layers` the trace holds for one depth only, which the script cannot use.
            if recorded is None or recorded.layers is None:
                return None
            self.places[key] = len(self.places)
            self._add(recorded)
        return self.places[key]

    def _add(self, recorded: RecordedPhase) -> None:
        # Numbers in place of names: the script gets the lists that they index.
        categories, half = list(Category), recorded.half
        moments = moments_of(half, recorded.largest)
        changes, before = [], np.zeros((2, len(moments.tensors)))
        # Each moment is stored as its difference from the moment before.
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
            # [elements, once, each, trained] of the weights, to count parameters.
            "parameters": [
                [self._term(half.read(elements, of_model=True)), *counts, free]
                for (elements, free), counts in weights.items()
            ],
        }.items():
            self.columns[name].append(column)

    def _work(self, half: PhaseTrace) -> list[list[int]]:
        """Rows [operator, once, each, once more, each more] of a half.

        How often an operator runs without any layers, and more per pattern of layers. The last two
        numbers are the same for each further micro-batch.
        """
        alike: dict[Work, list[int]] = {}
        for work, (once, each) in from_none(half.log.work, half.log.patterns).items():
            counts = alike.setdefault(work._replace(micro_batch=0), [0, 0, 0, 0])
            # Micro-batch 1 stands for all further ones; an optimizer step runs once.
            further = 2 if work.micro_batch == 1 and work.phase != Phase.STEP else 0
            counts[further] += once
            counts[further + 1] += each
        rows = []
        for work, counts in alike.items():
            # Operators repeat in many halves: each distinct one is stored once for all of them.
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
        """The number of a term; -1 for a term that is 0. The terms inside it get numbers first."""
        for factor, _ in term.powers:
            if isinstance(factor, ReductionBytes):
                # Its bytes depend on the GPU, so the script computes them from rows and columns.
                for side in factor:
                    self._term(side)
        return self.terms.setdefault(term, len(self.terms)) if term.constant else -1

    def _encoded(self, term: Term) -> list:
        """[constant, {symbol: exponent}, [rows, columns] ...] of a term.

        A pair at the end refers to the terms of a reduction's rows and columns.
        """
        encoded: list[Any] = [term.constant / term.divisor, {}]
        for factor, exponent in term.powers:
            if isinstance(factor, ReductionBytes):
                encoded.append([self._term(side) for side in factor])
            else:
                encoded[1][factor] = exponent
        return encoded

    def tables(self) -> dict:
        terms = [self._encoded(term) for term in self.terms]
        # Halves with similar tensors next to each other, for gzip.
        alike = sorted(self.places.values(), key=lambda place: self._text("tensors", place))
        halves = {name: self._encoded_once(name, alike) for name in self.columns}
        return {"terms": terms, "operators": list(self.operators), "halves": halves}

    def _encoded_once(self, name: str, order: list[int]) -> dict[str, list]:
        """{rows: the distinct values of a column, in `order`; of: the row of each half}."""
        texts = [self._text(name, place) for place in order]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        of = [numbers[self._text(name, place)] for place in self.places.values()]
        return {"rows": list(map(json.loads, numbers)), "of": of}

    def _text(self, name: str, place: int) -> str:
        return json.dumps(self.columns[name][place], separators=(",", ":"))


def has_traces(recipe: Recipe, card: GPU) -> bool:
    """Whether memlab ships the traces that the calculator needs for a recipe.

    A page has only traces of sequences that are shorter than the model's attention window.
    """
    window = getattr(models.settings(recipe.model), "sliding_window", None)
    if window and recipe.seq_len >= window:
        return False
    # A trace holds for all sizes, so it is stored under the usual ones.
    usual = usual_sizes(recipe)
    keys = keys_of(usual, *next(structures(usual, card, ignore_small_tensors=True)))
    return all(map(Shipped.of_memlab().has_half, keys))


def _counts(counts: np.ndarray) -> list[tuple[int, ...]]:
    """(tensor, once, each) of the tensors that occur in `counts`, of shape [2, tensors]."""
    return [(int(t), *map(int, counts[:, t])) for t in np.flatnonzero(counts.any(axis=0))]


def _flat(rows: Iterable[Any]) -> list[int]:
    """Sorted rows as one flat list; each row begins with the distance from the row before."""
    flat, place = [], 0
    for first, *rest in sorted(rows):
        flat += [first - place, *rest]
        place = first
    return flat


def _phase(name: Phase) -> int:
    return PHASES.index(name)
