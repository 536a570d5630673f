"""Traces of recipes: recorded at chosen sizes, checked against a run, then asked for any size.

What a step does falls into passes and updates, which know nothing of each other; the halves of a
trace are recorded, and kept, apart. Each is checked when it is recorded, against a run at other
sizes, event by event. Where they differ, as where a model loops over the chunks of a sequence,
there is no trace, and each size is run when it is asked for.

Traces that came with memlab were recorded with some releases of the libraries. With other releases
the same check decides, at first use, whether they still hold; the store keeps those that do.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from dataclasses import replace
from typing import NamedTuple

from memlab import models
from memlab.gpus import GPU
from memlab.predict.changed_code import has_changed_code
from memlab.predict.layer_patterns import FEWEST, Layers, layers_of
from memlab.predict.run import completed, gc_frozen, log_of, shallow_log
from memlab.predict.shipped import Shipped
from memlab.predict.store import Kept, Store
from memlab.predict.structure import (
    Circumstances,
    Structure,
    has_no_trace,
    structures,
    trained_as,
    with_like_states,
)
from memlab.spec.recipe import FOUR_BITS, TORCHAO_BLOCKS, Recipe
from memlab.trace.events import Alloc, Free
from memlab.trace.layered import LayeredLog
from memlab.trace.log import Log, peak_allocated
from memlab.trace.moments import largest_moments
from memlab.trace.symbols import ALIGNED
from memlab.trace.trace import Depth, Half, Trace
from memlab.workloads.training import import_libraries

# Lengths of the run that checks, by alignment, the second within short windows; its sequences
# unless there is one; its patterns, more than were recorded.
CHECKED = {16: (256, 48), 8: (88, 40), 4: (84, 36), 2: (82, 34), 1: (81, 33)}
CHECKED_BATCH = 2
CHECKED_PATTERNS = 4
PROBED_PATTERNS = 2  # with other releases: a first and a last layer meet every kernel
USUAL_LENGTH = 512  # tokens
SHALLOW = FEWEST, (2, 3, 4)  # patterns that are recorded; the first may be another kind
DEEP = 12  # up to so many layers the model itself is as quick, and its log tells layers apart
MORE = 2  # times as many steps as expected say that their number follows from sizes
KEPT, HALVES = 8, 128  # logs at full depth, and halves, of a process
# A recipe's fields that only the passes depend on.
OF_PASSES = ("checkpointing", "padded", "set_to_none")


class Found(NamedTuple):
    """The halves of a recipe's trace, passes and updates; patterns: of layers, in its model."""

    structures: tuple[Structure, Structure]
    keys: tuple[str, str]
    halves: list[Kept]
    patterns: int

    def sizes(self, recipe: Recipe) -> dict[str, int]:
        """The values of all symbols of both halves."""
        passed, updated = self.structures
        return updated.sizes(recipe) | passed.sizes(recipe)


class Traces:
    """Everything that is known of recipes' logs: halves by their keys, None for what has no trace.

    store: where halves outlive the process, or None. shipped: those that came with memlab, or None;
    of other releases than those here they are checked, unless `unchecked`.
    """

    def __init__(
        self,
        store: Store | None = None,
        shipped: Shipped | None = None,
        unchecked: bool = False,
    ):
        self._store, self._shipped, self._unchecked = store, shipped, unchecked
        self._known: dict[str, Kept | None] = {}
        # The last ones, the newest last: a log at full depth fills some MiB.
        self._joined: dict[tuple[str, str], Trace] = {}
        self._runs: dict[tuple, Log] = {}

    def log(self, recipe: Recipe, card: GPU) -> Log:
        """What two steps of a recipe, or a serving, do to memory on cards like this one."""
        if has_changed_code(recipe.model, recipe.task):
            return run_log(recipe, card)
        found = self.of(recipe, card) if isinstance(recipe, Recipe) else None
        if found is None:
            return self._run(recipe, card)
        trace, depth, sizes = found
        return completed(recipe, trace.at(sizes, depth))

    def peak_allocated(self, recipe: Recipe, card: GPU) -> int:
        """The most bytes of blocks in the measured step of `log`, which no allocator can be below.

        In some ten milliseconds of a recipe that has a trace.
        """
        found = None
        if isinstance(recipe, Recipe) and not has_changed_code(recipe.model, recipe.task):
            found = self.of(recipe, card)
        if found is None:
            return peak_allocated(self.log(recipe, card).events())
        trace, depth, sizes = found
        return trace.peak_allocated(sizes, depth)

    def of(self, recipe: Recipe, card: GPU) -> tuple[Trace, Depth, dict] | None:
        """The trace of a recipe on cards like this, with its depth and sizes; None for none."""
        found = self.halves_of(recipe, card)
        if found is None:
            return None
        depth = Depth(found.patterns, recipe.accumulation)
        sizes = found.sizes(recipe) | card.symbols
        make = functools.partial(Trace, *(one.half for one in found.halves))
        return last_used(self._joined, found.keys, make), depth, sizes

    def halves_of(self, recipe: Recipe, card: GPU, roughly: bool = False) -> Found | None:
        """The halves of a recipe's trace, recorded where they are not known; None for none.

        roughly: as for `structures`.
        """
        if has_no_trace(recipe, card):
            return None
        for of_halves in structures(recipe, card, roughly):
            keys = keys_of(recipe, *of_halves)
            halves = self._halves(keys, recipe, card, of_halves)
            if None in halves:
                continue
            layers = getattr(models.config(recipe.model), "num_hidden_layers", 1)
            patterns = {h.layers.patterns(layers) if h.layers else 1 for h in halves}
            if len(patterns) == 1 and None not in patterns:
                return Found(of_halves, keys, halves, patterns.pop())
        return None

    def _halves(self, keys, recipe, card, of_halves) -> list[Kept | None]:
        """The passes and the updates; what is recorded with either is kept, too."""
        if self._store:
            for key in keys:
                if key not in self._known:
                    self._store.read_into(self._known, key)
        if self._shipped and not self._known.keys() >= set(keys):
            self._take_shipped(keys, recipe, card, of_halves)
        for key, structure in zip(keys, of_halves, strict=True):
            if key not in self._known:
                recorded = record(recipe, card, structure) or (None, None)
                for name, of, half in zip(keys, of_halves, recorded, strict=True):
                    if of == structure and name not in self._known:
                        self._keep(name, half)
        halves = [self._known[key] for key in keys]
        for key in keys:
            last_used(self._known, key, None, HALVES)
        return halves

    def _take_shipped(self, keys, recipe, card, of_halves) -> None:
        """Add what came with memlab, where it holds with the releases that are here."""
        shipped: dict[str, Kept | None] = {}
        for key in keys:
            if key not in self._known:
                self._shipped.read_into(shipped, key)
        if self._unchecked or not self._shipped.others_of(recipe):
            self._known |= shipped
            return
        both = [shipped.get(key) or self._known.get(key) for key in keys]
        if None not in both and is_as_run(recipe, card, of_halves, both):
            for key, half in shipped.items():
                self._keep(key, half)

    def _keep(self, key: str, half: Kept | None) -> None:
        self._known[key] = half
        if self._store:
            self._store.write(key, half)

    def _run(self, recipe, card) -> Log:
        bare = vars(recipe) | {"model": models.config(recipe.model).to_json_string()}
        bare["expandable_segments"] = False  # a matter of the replay
        key = str(bare), card.capability, card.processors, card.workspace
        return last_used(self._runs, key, lambda: run_log(recipe, card))


def last_used(values: dict, key, make, most: int = KEPT):
    """The value of a key, made where it is not there; the last ones stay."""
    values[key] = values.pop(key) if key in values else make()
    while len(values) > most:
        del values[next(iter(values))]
    return values[key]


@functools.cache
def traces() -> Traces:
    """Those of this process: kept in the user's cache, or as they came with memlab."""
    return Traces(Store.of_user(), Shipped.of_memlab())


@functools.cache
def traces_of_any_release() -> Traces:
    """As `traces`, without a check of those that came with memlab; `formula` says so."""
    return Traces(Store.of_user(), Shipped.of_memlab(), unchecked=True)


def usual_sizes(recipe: Recipe) -> Recipe:
    """The recipe with several sequences, of a length that no kernel pads."""
    window = getattr(models.config(recipe.model), "sliding_window", None)
    longest = min(models.max_length(recipe.model) or USUAL_LENGTH, USUAL_LENGTH)
    if window and recipe.seq_len >= window:
        longest = window + ALIGNED
    elif window:
        longest = min(longest, window - 1)
    length = max(1, longest // ALIGNED) * ALIGNED
    return recipe.but(batch_size=CHECKED_BATCH, seq_len=length)


def is_deep(recipe: Recipe) -> bool:
    """Whether a model has so many layers that shallow ones are quicker to run."""
    return getattr(models.config(recipe.model), "num_hidden_layers", 0) > DEEP


def run_log(recipe: Recipe, card: GPU, loop=None) -> Log:
    """The log of a recipe at its own sizes, of shallow models where these stand for a deep one.

    loop: another training loop than memlab's own, a function like `memlab.predict.run.two_steps`.
    """
    import_libraries(recipe)
    card = card.without_limit()
    with gc_frozen():
        log = _stretched(recipe, card, loop) if is_deep(recipe) else None
        return completed(recipe, log or log_of(recipe, card, numbered=True, loop=loop))


def _stretched(recipe: Recipe, card: GPU, loop) -> Log | None:
    layers = layers_of(recipe)
    if not layers:
        return None
    run = functools.partial(shallow_log, gpu=card, loop=loop)
    try:
        halves = _of_shallow(recipe, layers, run)
    except ValueError:
        return None  # said at full depth, about the model that was asked for
    if not halves:
        return None
    batches = recipe.accumulation
    trace = Trace(*(Half(one, None, batches, card.workspace) for one in halves))
    patterns = layers.patterns(models.config(recipe.model).num_hidden_layers)
    return trace.at({}, Depth(patterns, batches))


def keys_of(recipe: Recipe, passes: Structure, updates: Structure) -> tuple[str, str]:
    """What the passes, and what the updates, of a recipe depend on."""
    both = trained_as(recipe)
    if recipe.ranks > 1:
        both |= {"ranks": recipe.ranks, "sharding": recipe.sharding}
    if recipe.replicas > 1:
        both["replicas"] = recipe.replicas
    if recipe.step_in_backward:
        both["step_in_backward"] = True
    passed = both | {name: getattr(recipe, name) for name in OF_PASSES}
    passed |= {"around": Circumstances.of(recipe), "attention": passes.attention}
    if recipe.loss != "whole":
        passed["loss"] = recipe.loss
    if recipe.packed:
        passed["packed"] = True
    updated = both | {"optimizer": recipe.optimizer, "clipped": recipe.max_grad_norm > 0}
    if recipe.optimizer in TORCHAO_BLOCKS:
        updated["torchao"] = importlib.metadata.version("torchao")
    return tuple(
        f"{structure.key} {json.dumps(way, sort_keys=True)}"
        for structure, way in ((passes, passed), (updates, updated))
    )


def record(recipe: Recipe, card: GPU, found: Structure) -> tuple[Kept, Kept] | None:
    """The halves of a recipe for all sizes under its circumstances; None where there are none."""
    try:
        with gc_frozen():
            return _recorded(recipe, card.without_limit(), found)
    except ValueError:
        return None  # a run of the recipe's own sizes says what is wrong with them


def _recorded(recipe: Recipe, card: GPU, found: Structure) -> tuple[Kept, Kept] | None:
    around = Circumstances.of(recipe)
    import_libraries(recipe)
    primed, sizes = found.chosen(recipe, around)
    like = with_like_states(recipe, found)
    layers, check = layers_of(primed), _to_check(like, around)
    halves = None
    if layers:
        of_check = _check_run(check, layers, card)
        run = functools.partial(shallow_log, gpu=card, most=MORE * len(of_check.steps))
        halves = _of_shallow(primed, layers, run)
    if not halves and found.widths:
        return None  # at its own depth it may as well have its own widths
    if not halves:
        layers, of_check = None, _check_run(check, None, card)
        log = log_of(primed, gpu=card, numbered=True, most=MORE * len(of_check.steps))
        halves = [LayeredLog.of([half], 1) for half in log.halves()]
    halves = [Half(one, sizes, around.batches, card.workspace) for one in halves]
    of_like = found if like is recipe else next(structures(like, card, roughly=True))[0]
    trace, depth = Trace(*halves), _depth_of_check(layers, around)
    if not are_alike(trace.at(of_like.sizes(check) | card.symbols, depth), of_check):
        return None
    return tuple(Kept(half, layers, largest_moments(half)) for half in halves)


def is_as_run(
    recipe: Recipe, card: GPU, of_halves: tuple[Structure, Structure], halves: list[Kept]
) -> bool:
    """Whether a trace of a recipe's structures is what a shallow run does with today's libraries.

    of_halves, halves: of the passes and of the updates. In about half a second.
    """
    around, layers = Circumstances.of(recipe), halves[0].layers
    if layers != halves[1].layers:
        return False
    import_libraries(recipe)
    try:
        with gc_frozen():
            like = with_like_states(recipe, of_halves[1])
            check = _to_check(like, around)
            of_check = _check_run(check, layers, card.without_limit(), PROBED_PATTERNS)
    except ValueError:
        return False  # a run of the recipe's own sizes says what is wrong with them
    own = of_halves if like is recipe else next(structures(like, card, roughly=True))
    sizes = own[1].sizes(check) | own[0].sizes(check) | card.symbols
    trace = Trace(*(kept.half for kept in halves))
    depth = _depth_of_check(layers, around, PROBED_PATTERNS)
    return are_alike(trace.at(sizes, depth), of_check)


def _check_run(
    check: Recipe, layers: Layers | None, card: GPU, patterns: int = CHECKED_PATTERNS
) -> Log:
    """A run that a trace must agree with: of a few layers, or of all where none repeats."""
    if layers is None:
        return log_of(check, gpu=card, numbered=True)
    return shallow_log(_deep(check, layers.number(patterns)), gpu=card)


def _depth_of_check(
    layers: Layers | None, around: Circumstances, patterns: int = CHECKED_PATTERNS
) -> Depth:
    return Depth(patterns if layers else 1, around.batches)


def _of_shallow(recipe: Recipe, layers: Layers, run) -> list[LayeredLog] | None:
    """Both halves for any depth; None where shallow models do not agree. run: gives a log."""
    logs = {}
    for depths in SHALLOW:
        for number in depths:
            if number not in logs:
                logs[number] = run(_deep(recipe, layers.number(number))).halves()
        halves = [
            LayeredLog.of([logs[number][half] for number in depths], depths[1]) for half in (0, 1)
        ]
        if None not in halves:
            return halves
    return None


def _deep(recipe: Recipe, layers: int) -> Recipe:
    return replace(recipe, model=models.with_layers(recipe.model, layers))


def are_alike(one: Log, other: Log) -> bool:
    """Whether two logs have the same events with the same bytes, and the same weights.

    Deaths in a row may stand in another order: nobody can tell the difference afterwards.
    """
    return one.weights == other.weights and _in_words(one) == _in_words(other)


def _in_words(log: Log) -> list:
    """The events of a log, storages named by the place of their birth, deaths in a row sorted.

    Of a buffer its bytes count, not the matrix that is summed.
    """
    places, words, dying = {}, [], []
    for name, step in log.events():
        if type(step) is Free:
            dying.append(places.pop(name))
            continue
        words += sorted(dying)
        dying.clear()
        if type(step) is Alloc:
            places[name], step = len(words), step._replace(reduction=None)
        words.append(step)
    return words + sorted(dying)


def _to_check(recipe: Recipe, around: Circumstances) -> Recipe:
    """The recipe at the sizes of the run that checks. Raises ValueError where it allows none.

    With 4-bit weights at its own, because bitsandbytes fuses products of few tokens.
    """
    if recipe.base in FOUR_BITS:
        return replace(recipe, accumulation=around.batches)
    length, shorter = CHECKED[around.alignment]
    window = getattr(models.config(recipe.model), "sliding_window", None)
    if window and not around.inside:
        length += -(-window // ALIGNED) * ALIGNED
    elif window and window <= length:
        length = shorter
    if window and around.inside and window <= length:
        raise ValueError(f"no length of the check is shorter than a window of {window}")
    batch = 1 if around.one_sequence else CHECKED_BATCH
    return replace(recipe, batch_size=batch, seq_len=length, accumulation=around.batches)
