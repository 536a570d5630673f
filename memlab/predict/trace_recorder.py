"""Record traces: run shallow models at chosen sizes, and check the result at other sizes.

The chosen sizes can be recognized in the bytes of every tensor (`memlab.trace.symbols`), and the
layers repeat (`memlab.trace.layered`). So the logs of two or three shallow models give the events
of any depth at any size. Before a trace is used it is compared, event by event, with a run at other
sizes and mostly at another depth. If they differ there is no trace.

A trace has two halves that are kept apart. One is the forward and backward passes. The other is
the update: gradient clipping and the optimizer step.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memlab import models
from memlab.gpus import GPU
from memlab.predict.layer_patterns import Layers, layers_of
from memlab.predict.recipe_log import gc_frozen, is_deep, with_all_micro_batches
from memlab.predict.run import Loop, log_of, shallow_log, two_updates
from memlab.predict.store import RecordedPhase
from memlab.predict.structure import Structure, TraceDomain, structures, with_matching_state_dtypes
from memlab.predict.traces import log_of_run
from memlab.spec.recipe import FOUR_BITS, Recipe, is_moved_by_sharding
from memlab.spec.serving import Workload
from memlab.trace.events import Alloc, Category, Free, Marker
from memlab.trace.layered import LayeredLog
from memlab.trace.log import Log
from memlab.trace.symbols import ALIGNED
from memlab.trace.trace import Depth, PhaseTrace, Trace
from memlab.workloads.training import import_libraries

# Sizes of the run that checks a trace. Alignment of the length -> (length, length for a model with
# a short attention window).
CHECKED = {16: (256, 48), 8: (88, 40), 4: (84, 36), 2: (82, 34), 1: (81, 33)}
CHECKED_BATCH = 2  # sequences, unless the trace is for one
# Layer patterns of the run that checks a stored trace after a library update. A first and a last
# pattern run every kernel, and so does one pattern of three or more layers.
PROBED_PATTERNS, PROBED_LAYERS = 2, 3
# Layer patterns of the models to record. Two depths are enough if the check is deeper than both of
# them. Otherwise three depths must agree; the first pattern may be of another kind. So it is where
# a pattern is one or two layers and FSDP moves their weights: only the first is not gathered ahead.
CHECKED_DEPTHS, SHARDED_DEPTHS = (1, 2), (2, 3)
AGREEING_DEPTHS = (1, 2, 3), (2, 3, 4)
# Bytes of a small tensor: an int64 for every pair of elements in a head of 512.
SMALL = 2048
# Give up a recording with more than this many times the expected events. Their number then depends
# on the sizes, so that no trace holds.
MAX_EVENT_RATIO = 2


def run_log(recipe: Workload, card: GPU, loop: Loop | None = None) -> Log:
    """The log of a recipe at its own sizes, from shallow models if they can represent a deep one.

    loop: a training loop to run instead of memlab's own, such as `memlab.predict.run.two_steps`.
    """
    halves = run_halves(recipe, card, loop)
    return log_of_run(recipe, halves) if halves else whole_log(recipe, card, loop)


def whole_log(recipe: Workload, card: GPU, loop: Loop | None = None) -> Log:
    """The log of a recipe at its own sizes and depth, with all layers run."""
    import_libraries(recipe)
    with gc_frozen():
        log = log_of(recipe, card.without_limit(), numbered=True, loop=loop)
        return with_all_micro_batches(recipe, log)


def run_halves(recipe: Workload, card: GPU, loop: Loop | None = None) -> list[RecordedPhase]:
    """Both halves of a deep model's log at its own sizes, recorded from shallow models.

    They hold at any depth, but at these sizes only. Empty if shallow models cannot represent the
    model. If the shallow models together have as many layers, the model itself is run instead.
    """
    layers = layers_of(recipe) if is_deep(recipe) else None
    number = models.settings(recipe.model).num_hidden_layers if layers else 0
    if layers is None or layers.patterns(number) is None:
        return []
    import_libraries(recipe)
    card = card.without_limit()
    halves: list[LayeredLog] | None
    with gc_frozen():
        if sum(map(layers.number, AGREEING_DEPTHS[0])) >= number:
            halves, layers = _of_one_depth(log_of(recipe, card, numbered=True, loop=loop)), None
        else:
            # Three depths must agree, as no run at other sizes checks the result.
            run = functools.partial(shallow_log, gpu=card, loop=loop)
            try:
                halves = _agreeing(_shallow_halves(recipe, layers, run))
            except ValueError:
                return []  # the caller runs all layers, so that an error names the user's model
    phases = (PhaseTrace(half, None, recipe.accumulation, card.workspace) for half in halves or ())
    return [RecordedPhase(phase, layers) for phase in phases]


def record(
    recipe: Recipe, card: GPU, structure: Structure, updates_alone: bool = False
) -> tuple[RecordedPhase, ...] | None:
    """Both halves of a trace for all sizes in the recipe's `TraceDomain`; None if there is none.

    updates_alone: whether the caller has the passes already. The returned passes may then be those
        of `two_updates` and must not be used.
    """
    # `two_updates` is quicker. If its update is not that of a training, record the whole step.
    for loop in (two_updates, None) if updates_alone else (None,):
        # A recipe that cannot be run has no trace. The caller runs the recipe itself, which raises
        # a better error.
        with contextlib.suppress(ValueError), gc_frozen():
            recorded = _recorded(recipe, card.without_limit(), structure, loop)
            if recorded:
                return recorded
    return None


def _recorded(
    recipe: Recipe, card: GPU, structure: Structure, loop: Loop | None = None
) -> tuple[RecordedPhase, ...] | None:
    """Both halves of a trace for all sizes, or None if the check refutes them.

    loop: the loop to record, as in `run_log`; None for memlab's own. The result is also None if the
    update of a given loop is not that of memlab's own.
    """
    around = TraceDomain.of(recipe)
    import_libraries(recipe)
    primed, sizes = structure.chosen(recipe, around)
    # The check runs at the recipe's own widths, unless they give 8-bit states to other tensors than
    # the chosen widths do.
    like = with_matching_state_dtypes(recipe, structure)
    layers, check = layers_of(primed), _to_check(like, around)
    gathered = is_moved_by_sharding(recipe) and layers is not None and layers.period <= 2
    depths = SHARDED_DEPTHS if gathered else CHECKED_DEPTHS
    deeper = depths[-1] + 1  # patterns of the check
    of_like = (
        structure if like is recipe else next(structures(like, card, ignore_small_tensors=True))[0]
    )
    checked_sizes = of_like.sizes(check) | card.symbols

    def checked(
        halves: list[LayeredLog], layers: Layers | None, of_check: Log
    ) -> tuple[RecordedPhase, ...] | None:
        """The halves as recorded phases; None if they differ from the run that checks them."""
        phases = [PhaseTrace(half, sizes, around.batches, card.workspace) for half in halves]
        log = Trace(*phases).at(checked_sizes, Depth(deeper if layers else 1, around.batches))
        if not are_alike(log, of_check):
            return None
        return tuple(RecordedPhase(phase, layers) for phase in phases)

    if layers:
        # The check runs first, because its number of events bounds that of the recording.
        of_check = _check_run(check, layers, card, deeper, loop)
        most = MAX_EVENT_RATIO * len(of_check.steps)
        run = functools.partial(shallow_log, gpu=card, most=most, loop=loop)
        shallow = _shallow_halves(primed, layers, run)
        if loop is not None:
            # The update must be that of a real training, here of a single pattern. With a limit of
            # events, even one that is never met, the buffers of sums are logged as in `shallow`.
            usual = shallow_log(_deep(primed, layers.number(1)), card, most=sys.maxsize)
            if usual.halves()[1] != shallow(1)[1]:
                return None
        # Two depths first, which the deeper check confirms or refutes. Then three depths that agree
        # with each other, if need be without the model of a single pattern.
        halves = _layered(shallow, depths)
        recorded = halves and checked(halves, layers, of_check)
        if recorded:
            return recorded
        halves = _agreeing(shallow)
        if halves:
            return checked(halves, layers, of_check)
    if structure.widths or loop is not None:
        # A trace at the model's own depth would serve only this model. It is recorded for the exact
        # structure, at the model's own widths.
        return None
    of_check = log_of(check, gpu=card, numbered=True)
    log = log_of(primed, gpu=card, numbered=True, most=MAX_EVENT_RATIO * len(of_check.steps))
    return checked(_of_one_depth(log), None, of_check)


def is_as_run(
    recipe: Recipe, card: GPU, of_halves: tuple[Structure, Structure], halves: list[RecordedPhase]
) -> bool:
    """Whether a stored trace agrees with a shallow run under the installed libraries.

    of_halves: the structures of the passes and of the update. halves: the halves of the trace.

    Takes about half a second, and some seconds for a long pattern.
    """
    around, layers = TraceDomain.of(recipe), halves[0].layers
    if layers != halves[1].layers:
        return False
    patterns = 1
    if layers:
        # The shallowest log of a recording has one pattern less than `LayeredLog.patterns`.
        shallowest = max(phase.half.log.patterns for phase in halves) - 1
        patterns = shallowest if layers.period >= PROBED_LAYERS else PROBED_PATTERNS
    import_libraries(recipe)
    try:
        with gc_frozen():
            check = _to_check(recipe, around)
            of_check = _check_run(check, layers, card.without_limit(), patterns)
    except ValueError:
        return False  # the caller runs the recipe itself, which raises a better error
    # Symbols of the passes take precedence; those of the update may be fewer.
    sizes = of_halves[1].sizes(check) | of_halves[0].sizes(check) | card.symbols
    trace = Trace(*(phase.half for phase in halves))
    log = trace.at(sizes, Depth(patterns, around.batches))
    return are_alike(log, of_check, strictly=False)


def _check_run(
    check: Recipe,
    layers: Layers | None,
    card: GPU,
    patterns: int,
    loop: Loop | None = None,
) -> Log:
    """The log of a run that a trace must agree with.

    Of a few layer patterns, or of all layers if `layers` is None.
    """
    if layers is None:
        return log_of(check, gpu=card, numbered=True)
    return shallow_log(_deep(check, layers.number(patterns)), gpu=card, loop=loop)


def _shallow_halves(
    recipe: Workload, layers: Layers, run: Callable[[Any], Log]
) -> Callable[[int], tuple[Log, ...]]:
    """A function from a number of layer patterns to both halves of a log; runs each depth once."""
    return functools.cache(lambda number: run(_deep(recipe, layers.number(number))).halves())


def _of_one_depth(log: Log) -> list[LayeredLog]:
    """Both halves of a log, for the depth of its model only."""
    return [layered for half in log.halves() if (layered := LayeredLog.of([half], 1))]


def _agreeing(shallow: Callable[[int], tuple[Log, ...]]) -> list[LayeredLog] | None:
    """Both halves for any depth, from the first three depths that agree; None if none do."""
    return next(filter(None, (_layered(shallow, depths) for depths in AGREEING_DEPTHS)), None)


def _layered(
    shallow: Callable[[int], tuple[Log, ...]], depths: Sequence[int]
) -> list[LayeredLog] | None:
    """Both halves for any depth, from the given depths; None if these do not agree."""
    layered_logs = [
        LayeredLog.of(logs, depths[1]) for logs in zip(*map(shallow, depths), strict=True)
    ]
    halves = [half for half in layered_logs if half is not None]
    return halves if len(halves) == len(layered_logs) else None


def _deep(recipe: Workload, layers: int) -> Workload:
    return replace(recipe, model=models.with_layers(recipe.model, layers))


def are_alike(log: Log, other: Log, strictly: bool = True) -> bool:
    """Whether two logs have the same events with the same bytes, and the same weights.

    Consecutive frees may be in any order, which makes no difference to the allocator afterwards.

    strictly: False to compare neither what may differ between models that share a trace, nor what
        differs from process to process (`canonical_events`).
    """
    events, others = (canonical_events(one, strictly) for one in (log, other))
    return log.weights == other.weights and events == others


def canonical_events(log: Log, strictly: bool = True) -> list:
    """The events of a log in a form in which equal logs are equal.

    A storage is named by the place of its allocation, and consecutive frees are sorted. The buffer
    of a reduction counts by its bytes, whatever the shape of the reduced matrix.

    strictly: False to leave out small temporaries and buffers made before the first step, which
        differ between kinds of rotary embeddings (`structure.SAME_ROPE`). Which of several storages
        with equal allocations is freed is left out, too: some models make them in the order of a
        set of strings, which depends on PYTHONHASHSEED.
    """
    places: dict[object, int] = {}
    words: list[Any] = []
    freed: list[Any] = []
    leaves_out = not strictly
    for name, step in log.events():
        if step is Marker.RESET:
            leaves_out = False  # the first step begins
        if type(step) is Free:
            if name in places:
                place = places.pop(name)
                freed.append(place if strictly else words[place])
            continue
        if leaves_out and type(step) is Alloc and _is_small(step):
            continue
        words += sorted(freed)
        freed.clear()
        if type(step) is Alloc:
            places[name], step = len(words), step._replace(reduction=None)
        words.append(step)
    return words + sorted(freed)


def _is_small(alloc: Alloc) -> bool:
    return alloc.category in (Category.TEMPORARY, Category.BUFFERS) and alloc.nbytes <= SMALL


def _to_check(recipe: Recipe, around: TraceDomain) -> Recipe:
    """The recipe at the sizes of the run that checks its trace.

    With 4-bit weights these are its own sizes, because bitsandbytes fuses products of few tokens.
    Raises ValueError if no such sizes are in the domain of the trace.
    """
    if recipe.base in FOUR_BITS:
        return replace(recipe, accumulation=around.batches)
    length, shorter = CHECKED[around.alignment]
    window = getattr(models.config(recipe.model), "sliding_window", None)
    # The length must be on the same side of the attention window as the trace. A multiple of
    # `ALIGNED` keeps the alignment.
    if window and not around.inside:
        length += -(-window // ALIGNED) * ALIGNED
    elif window and window <= length:
        length = shorter
    if window and around.inside and window <= length:
        raise ValueError(f"no length of the check is shorter than a window of {window}")
    batch = 1 if around.one_sequence else CHECKED_BATCH
    return replace(recipe, batch_size=batch, seq_len=length, accumulation=around.batches)
