"""Find, record and keep the trace of a recipe, which gives its log at any size.

A step has two halves that do not depend on each other. One is the forward and backward passes, the
other is the update: gradient clipping and the optimizer step. Each half of a trace has its own key,
so that recipes that differ in one half share the other.

A trace is recorded at chosen sizes and checked, event by event, against a run at other sizes. If
they differ there is no trace, for example because the model loops over chunks of a sequence. Each
size is then run when it is first needed, and that run is kept, too.

The traces that come with memlab were recorded with certain library releases. With other releases
the same check decides at first use whether they still hold. The store keeps those that do.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from memlab import models
from memlab.gpus import GPU
from memlab.libraries import cache_folder, has_changed_code
from memlab.predict.recipe_log import with_all_micro_batches
from memlab.predict.shipped import Shipped
from memlab.predict.store import RecordedPhase, Store
from memlab.predict.structure import (
    Structure,
    TraceDomain,
    changes_of_sdpa,
    has_no_trace,
    structures,
)
from memlab.spec.recipe import FOUR_BITS, Recipe
from memlab.spec.serving import Serving, Workload
from memlab.trace.log import Log, peak_allocated
from memlab.trace.symbols import ALIGNED
from memlab.trace.trace import Depth, Trace

BLOCK_OF_A_SCALE = 64  # 4-bit weights per scale, as transformers quantizes
USUAL_BATCH, USUAL_LENGTH = 2, 512  # sequences and tokens of `usual_sizes`
# Logs at full depth, and halves of traces, that a process keeps in memory.
MAX_CACHED_LOGS, MAX_CACHED_PHASES = 8, 128
# Fields of a recipe on which only the passes depend. The gradients are allocated in the passes, so
# what zero_grad does to them belongs to the passes, too.
OF_PASSES = ("checkpointing", "padded", "set_to_none")


class TraceLookup(NamedTuple):
    """A recipe's trace as it was found.

    structures, keys, halves: those of the passes and of the update. patterns: the number of layer
    patterns of the recipe's model.
    """

    structures: tuple[Structure, Structure]
    keys: tuple[str, str]
    halves: list[RecordedPhase]
    patterns: int

    def sizes(self, recipe: Recipe) -> dict[str, int]:
        """Symbol -> its value in a recipe, for the symbols of both halves."""
        passed, updated = self.structures
        return updated.sizes(recipe) | passed.sizes(recipe)


class Traces:
    """All traces and runs that this process knows.

    store: where halves outlive the process; None to keep them in memory only.
    shipped: the halves that came with memlab, or None. They are checked before use if the installed
        libraries are of other releases.
    """

    def __init__(self, store: Store | None = None, shipped: Shipped | None = None):
        self._store, self._shipped = store, shipped
        # Key -> half; None for a key that is known to have no trace.
        self._phases: dict[str, RecordedPhase | None] = {}
        # Least recently used first (`lru_get`). Few are kept: a log at full depth takes some MiB.
        self._joined: dict[tuple[str, str], Trace] = {}
        self._runs: dict[tuple, Log] = {}

    def log(self, recipe: Workload, card: GPU) -> Log:
        """The log of two steps of a recipe, or of a serving, on GPUs like this one."""
        lookup = self.of(recipe, card)
        if lookup is None:
            return self._run(recipe, card)
        trace, depth, sizes = lookup
        return with_all_micro_batches(recipe, trace.at(sizes, depth))

    def peak_allocated(self, recipe: Workload, card: GPU) -> int:
        """The peak of requested bytes, rounded up to blocks, in the measured step of `log`.

        No allocator reserves less. Takes some ten milliseconds for a recipe that has a trace.
        """
        lookup = self.of(recipe, card)
        if lookup is None:
            return peak_allocated(self.log(recipe, card).events())
        trace, depth, sizes = lookup
        return trace.peak_allocated(sizes, depth)

    def of(self, recipe: Workload, card: GPU) -> tuple[Trace, Depth, dict] | None:
        """(trace, depth, sizes) of a recipe on GPUs like this one; None if it has no trace.

        A serving has no trace, because its cache grows with each token. Nor has a model with code
        that was patched in this process.
        """
        if isinstance(recipe, Serving) or _has_changed_code(recipe):
            return None
        lookup = self.halves_of(recipe, card)
        if lookup is None:
            return None
        depth = Depth(lookup.patterns, recipe.accumulation)
        sizes = lookup.sizes(recipe) | card.symbols
        make = functools.partial(Trace, *(phase.half for phase in lookup.halves))
        return lru_get(self._joined, lookup.keys, make), depth, sizes

    def halves_of(self, recipe: Recipe, card: GPU) -> TraceLookup | None:
        """The halves of a recipe's trace, recorded if need be; None if it has no trace."""
        if has_no_trace(recipe, card):
            return None
        for of_halves in structures(recipe, card):
            keys = keys_of(recipe, *of_halves)
            phases = self._halves(keys, recipe, card, of_halves)
            halves = [half for half in phases if half is not None]
            if len(halves) < len(keys):
                continue
            # Both halves must give the recipe's number of layers by the same number of patterns. A
            # half that was recorded at the model's own depth counts as one pattern.
            layers = getattr(models.settings(recipe.model), "num_hidden_layers", 1)
            patterns, *others = {h.layers.patterns(layers) if h.layers else 1 for h in halves}
            if patterns is not None and not others:
                return TraceLookup(of_halves, keys, halves, patterns)
        return None

    def _halves(
        self,
        keys: tuple[str, str],
        recipe: Recipe,
        card: GPU,
        of_halves: tuple[Structure, Structure],
    ) -> list[RecordedPhase | None]:
        """Both halves: from memory, the store or the shipped traces, else recorded now."""
        if self._store:
            for key in keys:
                if key not in self._phases:
                    self._store.read_into(self._phases, key)
        if self._shipped and not self._phases.keys() >= set(keys):
            self._take_shipped(self._shipped, keys, recipe, card, of_halves)
        for key, structure in zip(keys, of_halves, strict=True):
            if key not in self._phases:
                from memlab.predict.trace_recorder import record

                # `two_updates`, the quicker recording, is right for a single rank only.
                updates_alone = recipe.ranks == 1 and self._phases.get(keys[0]) is not None
                recorded = record(recipe, card, structure, updates_alone) or (None, None)
                # A recording gives both halves. Keep the other one, too, if it is of the structure
                # that is wanted for it and is not known. Known passes stay: see `updates_alone`.
                for name, of, half in zip(keys, of_halves, recorded, strict=True):
                    if of == structure and name not in self._phases:
                        self._keep(name, half)
        # Mark both keys as used, which evicts the oldest. Marking the first may evict the second,
        # which is then put back.
        halves = [self._phases[key] for key in keys]
        for key, half in zip(keys, halves, strict=True):
            lru_get(self._phases, key, lambda half=half: half, MAX_CACHED_PHASES)
        return halves

    def _take_shipped(
        self,
        shipped: Shipped,
        keys: tuple[str, str],
        recipe: Recipe,
        card: GPU,
        of_halves: tuple[Structure, Structure],
    ) -> None:
        """Add the halves that came with memlab, if they hold with the installed releases."""
        halves: dict[str, RecordedPhase | None] = {}
        for key in keys:
            if key not in self._phases:
                shipped.read_into(halves, key)
        if not shipped.others_of(recipe):
            self._phases |= halves
            return
        from memlab.predict.trace_recorder import is_as_run

        # The check runs a whole step, so it needs both halves. One may be in memory already.
        phases = [halves.get(key) or self._phases.get(key) for key in keys]
        complete = [half for half in phases if half is not None]
        if len(complete) == len(keys) and is_as_run(recipe, card, of_halves, complete):
            for key, half in halves.items():
                self._keep(key, half)

    def _keep(self, key: str, half: RecordedPhase | None) -> None:
        self._phases[key] = half
        if self._store:
            self._store.write(key, half)

    def _run(self, recipe: Workload, card: GPU) -> Log:
        # The key does not describe patched code, so such a run is not kept.
        if _has_changed_code(recipe):
            from memlab.predict.trace_recorder import run_log

            return run_log(recipe, card)
        bare = vars(recipe) | {"model": models.config(recipe.model).to_json_string()}
        bare["expandable_segments"] = False  # matters in the replay only
        key = str(bare), card.capability, card.processors, card.workspace, *changes_of_sdpa()
        return lru_get(self._runs, key, lambda: self._kept_or_run(recipe, card, str(key)))

    def _kept_or_run(self, recipe: Workload, card: GPU, key: str) -> Log:
        """A run at a recipe's own sizes; stored if it was made from shallow models."""
        names = f"run, passes {key}", f"run, updates {key}"
        phases: dict[str, RecordedPhase | None] = {}
        if self._store:
            for name in names:
                self._store.read_into(phases, name)
        halves = [half for half in phases.values() if half is not None]
        if len(halves) < len(names):
            from memlab.predict.trace_recorder import run_halves, whole_log

            halves = run_halves(recipe, card)
            if not halves:
                return whole_log(recipe, card)
            if self._store:
                for name, half in zip(names, halves, strict=True):
                    self._store.write(name, half)
        return log_of_run(recipe, halves)


def _has_changed_code(recipe: Workload) -> bool:
    return has_changed_code(models.settings(recipe.model).model_type)


def log_of_run(recipe: Workload, halves: Sequence[RecordedPhase]) -> Log:
    """The log of a recipe from the halves of `trace_recorder.run_halves`, at its own sizes."""
    layers = halves[0].layers
    number = models.settings(recipe.model).num_hidden_layers if layers else 1
    patterns = layers.patterns(number) if layers else 1
    assert patterns is not None  # `run_halves` would have returned no halves
    # No sizes to fill in: the halves hold concrete bytes.
    trace = Trace(*(phase.half for phase in halves))
    return with_all_micro_batches(recipe, trace.at({}, Depth(patterns, recipe.accumulation)))


def lru_get(values: dict, key: object, make: Any, most: int = MAX_CACHED_LOGS) -> Any:
    """The value of a key, made by `make()` if it is missing. Keeps the `most` last used values."""
    # Dictionaries keep the order of insertion, so the last used key is the last one.
    values[key] = values.pop(key) if key in values else make()
    while len(values) > most:
        del values[next(iter(values))]
    return values[key]


@functools.cache
def traces() -> Traces:
    """The traces of this process, with the user's cache and the traces that came with memlab."""
    return Traces(Store(cache_folder() / "traces"), Shipped.of_memlab())


def usual_sizes(recipe: Recipe) -> Recipe:
    """The recipe with several sequences, and with a length that no kernel pads.

    The length is on the same side of the attention window as the recipe's own.
    """
    window = getattr(models.settings(recipe.model), "sliding_window", None)
    longest = min(models.max_length(recipe.model) or USUAL_LENGTH, USUAL_LENGTH)
    if window and recipe.seq_len >= window:
        longest = window + ALIGNED
    elif window:
        longest = min(longest, window - 1)
    length = max(1, longest // ALIGNED) * ALIGNED
    return recipe.but(batch_size=USUAL_BATCH, seq_len=length)


def keys_of(recipe: Recipe, passes: Structure, updates: Structure) -> tuple[str, str]:
    """(key of the passes, key of the update): everything but sizes that each half depends on.

    Each key is the structure's key, a space and JSON.
    """
    common: dict[str, Any] = {
        "task": recipe.task,
        "precision": recipe.precision,
        "freeze": sorted(map(str, recipe.freeze)),
    }
    if recipe.lora_rank:
        targets = recipe.lora_targets
        names = targets if isinstance(targets, str) else sorted(targets)
        common["lora"] = [names, recipe.lora_dropout > 0, recipe.lora_fp32]
    if recipe.base != "none":
        common["base"] = [recipe.base, recipe.compute_dtype, recipe.upcast]
        if recipe.base in FOUR_BITS:
            common["base"] += [BLOCK_OF_A_SCALE, recipe.double_quant]
    if recipe.ranks > 1:
        common |= {"ranks": recipe.ranks, "sharding": recipe.sharding}
    if recipe.replicas > 1:
        common["replicas"] = recipe.replicas
    passed = common | {name: getattr(recipe, name) for name in OF_PASSES}
    passed |= {"around": TraceDomain.of(recipe), "attention": passes.attention}
    if recipe.packed:
        passed["packed"] = True
    updated = common | {"optimizer": recipe.optimizer, "clipped": recipe.max_grad_norm > 0}
    return (
        f"{passes.key} {json.dumps(passed, sort_keys=True)}",
        f"{updates.key} {json.dumps(updated, sort_keys=True)}",
    )
