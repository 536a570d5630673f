"""The memory and the time of a training step by arithmetic alone: a trace without its replay.

Every tensor of a step has a size like 4 * b * s * f bytes, and every operator moves and multiplies
such tensors. A trace has these products (`memlab.predict.traces`), and of each of its halves, the
passes and the updates, the moments at which a peak can be (`memlab.trace.moments`). At a moment of
a pass the optimizer's states are there, too; at one of an update everything is that the pass
leaves. Sums over them are the peak of any model and any sizes of the same structure.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from memlab import models
from memlab.card.step_time import PHASES, Columns, step_time
from memlab.card.work import Work, count_coded, count_kernels, count_tiles
from memlab.footprint import Category, Footprint, Phase
from memlab.gpus import GPU, find_gpu
from memlab.predict.formula_blocks import blocks_of, rests_of, without_reuse
from memlab.predict.recipe_log import assumed, refuse_format
from memlab.predict.shipped import Shipped
from memlab.predict.store import Kept
from memlab.predict.structure import structures
from memlab.predict.traces import keys_of, last_used, traces_of_any_release, usual_sizes
from memlab.spec.recipe import Recipe
from memlab.trace.moments import from_none
from memlab.trace.symbols import Term, TermTable, factors_of
from memlab.trace.trace import Half

Each = tuple[int, int]  # how often without layers, and more often with each pattern of them
NOTHING = Term(0, 1, ())
OTHERS = "the formula is of {}; where simulate answers, it is of the releases here"


def formula(recipe: Recipe, gpu: GPU | str | int | None = None) -> Footprint:
    """The footprint of one optimizer step of `recipe`, by arithmetic alone, without a timeline.

    gpu: as for `simulate`; it decides the kernels of attention, the size of the workspaces, the
    context and the seconds.

    Domain: recipes that have a trace whose layers repeat (`memlab.predict.traces`); it is recorded,
    in seconds, where it is not kept. Sizes are free, and there is one rank. The trace is that of
    several sequences of a length that no kernel pads, whatever the recipe's. Tensors are exact,
    each in the block that the allocator would give it in a fresh segment, and in segments that
    several share as if the largest came first; what a reused block has over is not in it, nor what
    loading a quantized base leaves behind. Which vectors have 8-bit states is that of wide models:
    of narrow ones those below 4,096 numbers have them in 32 bits, some KiB more. No out-of-memory
    error: compare with `gpu.usable` yourself.

    What is reserved is a matter of order, which sums do not have. So peak_reserved and device_used
    are None, and `reserved_range` holds, in bytes, peak_allocated, below which no allocator can be,
    and what would be reserved if no block were ever used again for another size, and one of the
    largest were split. The upper end is usual and no bound: several blocks may be split, and of the
    moments of a step only those are known at which a peak can be. benchmarks/formula.py counts how
    often it holds, benchmarks/border.py what fits by it and does not run.

    Raises ValueError outside the domain, and where the card does not have the recipe's number
    format; `simulate` can still run such a recipe.
    """
    card = find_gpu(gpu)
    refuse_format(recipe, card)
    keys, halves, sizes, assumptions = _halves(recipe, card)
    table = last_used(_TABLES, keys, lambda: Tables.of(*halves), 256)
    layers = models.config(recipe.model).num_hidden_layers
    (patterns,) = {half.layers.patterns(layers) for half in halves if half.layers}
    assert patterns is not None  # without a pattern there were no halves
    return _evaluate(recipe, table, sizes, patterns, card, assumptions)


class Tables(NamedTuple):
    """Two halves put together, as arrays.

    terms: all of them; tensors, parameters and work have their places. tensors: the term of each
    kind; items: bytes of its elements; categories: what it is. once, each: how many of each, rows
    are moments, without layers and more with each pattern of them. phases: of the moments.
    parameters: rows of [term, once, each, trained].
    """

    terms: TermTable
    tensors: np.ndarray
    items: np.ndarray
    categories: list[Category]
    once: np.ndarray
    each: np.ndarray
    phases: list[Phase]
    parameters: np.ndarray
    work: Operators

    @classmethod
    def of(cls, passed: Kept, updated: Kept) -> Tables:
        """Those of two kept halves."""
        terms, found = TermTable(), (passed.moments, updated.moments)
        first = len(found[0].tensors)
        tensors = [one for moments in found for one in moments.tensors]
        left, states = (_wide(m.beside, i * first, len(tensors)) for i, m in enumerate(found))
        rows = [
            _wide(np.stack([moments.once, moments.each]), i * first, len(tensors))
            + (left + states if i else states)[:, None]
            for i, moments in enumerate(found)
        ]
        once, each = np.concatenate(rows, axis=1)
        read = passed.half.read
        log = passed.half.log
        weights = cast(dict[tuple[int, bool], Each], from_none(log.weights, log.patterns))
        return cls(
            terms,
            np.array([terms.place(term) for _, term, _ in tensors]),
            np.array([item for *_, item in tensors]),
            [category for category, *_ in tensors],
            once,
            each,
            [phase for moments in found for phase in moments.phases],
            np.array(
                [
                    [terms.place(read(elements, of_model=True)), *counts, free]
                    for (elements, free), counts in weights.items()
                ]
            ),
            Operators.of_halves((passed, updated), terms),
        )


def _wide(counts: np.ndarray, first: int, columns: int) -> np.ndarray:
    """The counts of some tensors, from the first on, among those of both halves."""
    wide = np.zeros((*counts.shape[:-1], columns))
    wide[..., first : first + counts.shape[-1]] = counts
    return wide


class Operators(NamedTuple):
    """Operators as arrays: terms by their places; `moved` a list for each of them.

    counts: rows of [once, each, once of each further micro-batch, each of it].
    """

    dtypes: list[str]
    dtype_of_each: list[str]
    of: np.ndarray
    flops: np.ndarray
    result: np.ndarray
    moved: np.ndarray
    mover: np.ndarray
    lists: np.ndarray
    elements: np.ndarray
    phase: np.ndarray
    recomputed: np.ndarray
    counts: np.ndarray

    @classmethod
    def of_halves(cls, halves: tuple[Kept, Kept], terms: TermTable) -> Operators:
        """Those of both halves of a trace."""
        rows = [row for kept in halves for row in operators_of(kept.half)]
        dtypes = sorted({dtype for dtype, *_ in rows if dtype})
        place = {dtype: i for i, dtype in enumerate(dtypes)} | {"": -1}
        of_each, flops, result, moved, lists, elements, phase, recomputed, counts = zip(
            *rows, strict=True
        )
        return cls(
            dtypes,
            list(of_each),
            np.array([place[dtype] for dtype in of_each]),
            np.array([terms.place(term) for term in flops]),
            np.array([[terms.place(t) for t in one or (NOTHING,) * 3] for one in result]),
            np.array([terms.place(t) for one in moved for t in one], int),
            np.array([i for i, one in enumerate(moved) for _ in one], int),
            np.array(lists),
            np.array([terms.place(term) for term in elements]),
            np.array([PHASES.index(one) for one in phase]),
            np.array(recomputed, bool),
            np.array(counts),
        )


def operators_of(half: Half) -> list[tuple[Any, ...]]:
    """The operators of a half by terms, and how often each runs, as columns of `Operators`."""
    alike: dict[Work, list[int]] = {}
    work = cast(dict[Work, Each], from_none(half.log.work, half.log.patterns))
    for one, (once, each) in work.items():
        counts = alike.setdefault(one._replace(micro_batch=0), [0, 0, 0, 0])
        further = 2 if one.micro_batch == 1 and one.phase != Phase.STEP else 0
        counts[further] += once
        counts[further + 1] += each
    return [
        (
            one.dtype,
            half.read(one.flops, whole=True),
            tuple(map(half.read, one.result)),
            tuple(map(half.read, one.moved)),
            one.lists,
            half.read(one.elements),
            one.phase,
            one.recomputed,
            counts,
        )
        for one, counts in alike.items()
    ]


def _halves(
    recipe: Recipe, card: GPU
) -> tuple[tuple[str, ...], list[Kept], dict[str, int], tuple[str, ...]]:
    """(keys, halves, sizes, what is assumed of them) of the passes and the updates of a recipe."""
    if not set(recipe.freeze) <= {"embeddings", "backbone"}:
        raise ValueError(
            f"freeze holds {', '.join(map(str, recipe.freeze))}: the formula allows embeddings and "
            "backbone"
        )
    if recipe.ranks > 1:
        raise ValueError(f"ranks is {recipe.ranks}: the formula is of one, simulate knows more")
    found = traces_of_any_release().halves_of(usual_sizes(recipe), card, roughly=True)
    if found is None or found.halves[0].layers is None:
        raise ValueError(
            f"no formula for {recipe}: its layers have no common pattern, or other sizes do "
            "other things; simulate knows it"
        )
    shipped = Shipped.of_memlab()
    others = shipped.others_of(recipe) if any(key in shipped for key in found.keys) else ""
    assumptions = (OTHERS.format(others),) if others else ()
    sizes = found.sizes(recipe) | card.symbols
    of_updates = found.halves[1].half.log.assumptions
    return found.keys, found.halves, sizes, (*assumptions, *of_updates)


def is_kept(recipe: Recipe, card: GPU) -> bool:
    """Whether the traces that `formula` needs came with memlab: it records others in seconds."""
    usual = usual_sizes(recipe)
    keys = keys_of(usual, *next(structures(usual, card, roughly=True)))
    return all(map(Shipped.of_memlab().has_half, keys))


def _evaluate(
    recipe: Recipe,
    table: Tables,
    sizes: dict[str, int],
    patterns: int,
    card: GPU,
    assumptions: tuple[str, ...],
) -> Footprint:
    term, once, each, trained = table.parameters.T
    numbers = once + patterns * each
    factors = factors_of(sizes) | {"n": int(numbers @ trained)}
    terms = table.terms.at(factors)
    tensors = np.ceil(terms[table.tensors] / table.items) * table.items
    elements = np.round(terms[term.astype(int)])
    counts = table.once + patterns * table.each
    grow = recipe.expandable_segments
    blocks = blocks_of(tensors, grow)
    allocated = counts @ blocks
    worst = int(allocated.argmax())
    peak = int(allocated[worst]) + (0 if grow else rests_of(blocks, counts[worst]))
    breakdown = dict.fromkeys(Category, 0)
    for category, size, count in zip(table.categories, tensors, counts[worst], strict=True):
        breakdown[category] += round(count * size)
    breakdown[Category.ROUNDING] = peak - sum(breakdown.values())
    seconds, no_time = None, ""
    try:
        columns = _columns(table.work, terms, patterns, recipe.accumulation)
        seconds = step_time(columns, card, recipe.batch_size * recipe.accumulation)
    except ValueError as error:
        no_time = str(error)
    weights = elements * numbers
    return Footprint(
        peak_allocated=peak,
        peak_reserved=None,
        reserved_range=(peak, max(peak, without_reuse(blocks, counts, grow))),
        breakdown=breakdown,
        peak_phase=table.phases[worst],
        context=card.context,
        parameters=round(weights.sum()),
        trainable_parameters=round(weights @ trained),
        step_time=seconds,
        no_time=no_time,
        assumptions=(*assumed(recipe), *assumptions),
    )


def _columns(work: Operators, terms: np.ndarray, patterns: int, accumulation: int) -> Columns:
    """The operators of a step, with numbers in place of terms."""
    once, each, again, each_again = work.counts.T
    times = once + patterns * each + (accumulation - 1) * (again + patterns * each_again)
    return Columns(
        work.dtypes,
        work.of,
        terms[work.flops],
        count_tiles(terms[work.result], work.dtype_of_each),
        np.bincount(work.mover, terms[work.moved], len(times)),
        count_kernels(work.lists, terms[work.elements]),
        work.phase,
        work.recomputed,
        times,
        count_coded(work.lists, terms[work.elements]),
    )


_TABLES: dict[tuple[str, str], Tables] = {}  # by the keys of both halves, those used last
