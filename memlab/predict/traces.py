"""Traces of recipes: recorded at chosen sizes, checked against a run, then asked for any size.

What a step does falls into passes and updates, which know nothing of each other; the halves of a
trace are recorded, and kept, apart. Each is checked when it is recorded, against a run at other
sizes, event by event. Where they differ, as where a model loops over the chunks of a sequence,
there is no trace, and each size is run when it is asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import torch

from memlab import models
from memlab.gpus import GPU
from memlab.predict.structure import Circumstances, Structure, has_fused_products, structures
from memlab.recipe import FULLY_SHARDED, Recipe
from memlab.simulation import log_of, only_new_garbage, shallow_log
from memlab.trace.events import Birth, Death
from memlab.trace.layered import LayeredLog
from memlab.trace.log import Log
from memlab.trace.symbols import ALIGNED
from memlab.trace.trace import Depth, Half, Trace
from memlab.training import import_libraries

# Lengths of the run that checks, by alignment, the second within short windows; its sequences
# unless there is one; its patterns, more than were recorded.
CHECKED = {16: (256, 48), 8: (88, 40), 4: (84, 36), 2: (82, 34), 1: (81, 33)}
CHECKED_PATTERNS = 4
CHECKED_BATCH = 2
LONGEST_PATTERN = 12  # layers
SHALLOW = (1, 2, 3), (2, 3, 4)  # patterns; of one the first layer may be another kind
MORE = 2  # times as many steps as expected say that their number follows from sizes
# A recipe's fields that only one half depends on, with what the other is recorded with.
OF_PASSES = {"checkpointing": "none", "padded": False}
OF_UPDATES = {"optimizer": "sgd", "max_grad_norm": 0.0}


@dataclass(frozen=True)
class Layers:
    """How a stack of layers repeats: once `before`, patterns of `period` layers, once `after`."""

    before: int
    period: int
    after: int

    def number(self, patterns: int) -> int:
        """Layers of a model with so many patterns."""
        return self.before + patterns * self.period + self.after

    def patterns(self, layers: int) -> int | None:
        """Patterns of a model with so many layers, None where it does not come out even."""
        patterns, rest = divmod(layers - self.before - self.after, self.period)
        return None if rest or patterns < 1 else patterns


@dataclass(frozen=True)
class Kept:
    """A half with the layers that it is of; None for a model that ran at its own depth."""

    half: Half
    layers: Layers | None


class Traces:
    """The halves that are known, by their keys; None for what has no trace."""

    def __init__(self):
        self.known: dict[str, Kept | None] = {}

    def of(self, recipe: Recipe, card: GPU) -> tuple[Trace, Depth, dict] | None:
        """The trace of a recipe on cards like this, with its depth and sizes; None for none."""
        if has_fused_products(recipe, card):
            return None
        for found in structures(recipe, card):
            keys = keys_of(recipe, found)
            if not self.known.keys() >= set(keys):
                recorded = record(recipe, card, found) or (None, None)
                self.known = dict(zip(keys, recorded, strict=True)) | self.known
            halves = [self.known[key] for key in keys]
            if None not in halves:
                layers = getattr(models.config(recipe.model), "num_hidden_layers", 1)
                patterns = {h.layers.patterns(layers) if h.layers else 1 for h in halves}
                if len(patterns) == 1 and None not in patterns:
                    depth = Depth(patterns.pop(), recipe.accumulation)
                    sizes = found.sizes(recipe) | {"W": card.workspace}
                    return Trace(*(kept.half for kept in halves)), depth, sizes
        return None


def keys_of(recipe: Recipe, found: Structure) -> tuple[str, str]:
    """What the passes, and what the updates, of a recipe depend on."""
    both = {
        "task": recipe.task,
        "precision": recipe.precision,
        "freeze": sorted(map(str, recipe.freeze)),
    }
    if recipe.ranks > 1:
        both |= {"ranks": recipe.ranks, "sharding": recipe.sharding}
    if recipe.lora_rank:
        targets = recipe.lora_targets
        both["lora"] = [
            targets if isinstance(targets, str) else sorted(targets),
            recipe.lora_dropout > 0,
            recipe.lora_fp32,
        ]
    if recipe.base != "none":
        both["base"] = [recipe.base, recipe.compute_dtype, recipe.upcast]
        if recipe.base != "int8":
            both["base"] += [recipe.block_size, recipe.double_quant]
    passed = both | {name: getattr(recipe, name) for name in OF_PASSES}
    passed |= {"set_to_none": recipe.set_to_none, "around": Circumstances.of(recipe)}
    updated = both | {"optimizer": recipe.optimizer, "clipped": recipe.max_grad_norm > 0}
    return tuple(f"{found.key} {json.dumps(way, sort_keys=True)}" for way in (passed, updated))


def record(recipe: Recipe, card: GPU, found: Structure) -> tuple[Kept, Kept] | None:
    """The halves of a recipe for all sizes under its circumstances; None where no trace is theirs."""
    try:
        with only_new_garbage():
            return _recorded(recipe, card.without_limit(), found)
    except ValueError:
        return None  # a run of the recipe's own sizes says what is wrong with them


def _recorded(recipe: Recipe, card: GPU, found: Structure) -> tuple[Kept, Kept] | None:
    around = Circumstances.of(recipe)
    import_libraries(recipe)
    primed, sizes = found.chosen(recipe, around)
    sizes["W"] = card.workspace
    layers, check = layers_of(primed), _to_check(recipe, around)
    halves = None
    if layers:
        patterns = CHECKED_PATTERNS
        of_check = shallow_log(_deep(check, layers.number(patterns)), gpu=card)
        halves = _of_shallow(primed, layers, card, MORE * len(of_check.steps))
    if not halves and found.widths:
        return None  # at its own depth it may as well have its own widths
    if not halves:
        layers, patterns, of_check = None, 1, log_of(check, gpu=card, numbered=True)
        log = log_of(primed, gpu=card, numbered=True, most=MORE * len(of_check.steps))
        halves = [LayeredLog.of([half], 1) for half in log.halves()]
    halves = [Half(one, sizes, around.batches) for one in halves]
    checked = found.sizes(check) | {"W": card.workspace}
    if not are_alike(Trace(*halves).at(checked, Depth(patterns, around.batches)), of_check):
        return None
    return tuple(Kept(half, layers) for half in halves)


def _of_shallow(primed: Recipe, layers: Layers, card: GPU, most: int) -> list[LayeredLog] | None:
    """Both halves for any depth; None where shallow models do not agree.

    most: births and deaths there may be.
    """
    logs = {}
    for depths in SHALLOW:
        for number in depths:
            if number not in logs:
                short = _deep(primed, layers.number(number))
                logs[number] = shallow_log(short, gpu=card, most=most).halves()
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
    """The events of a log, storages named by the place of their birth, deaths in a row sorted."""
    places, words, dying = {}, [], []
    for name, step in log.events():
        if type(step) is Death:
            dying.append(places.pop(name))
            continue
        words += sorted(dying)
        dying.clear()
        if type(step) is Birth:
            places[name] = len(words)
        words.append(step)
    return words + sorted(dying)


def _to_check(recipe: Recipe, around: Circumstances) -> Recipe:
    """The recipe at the sizes of the run that checks. Raises ValueError where it allows none.

    With 4-bit weights at its own, because bitsandbytes fuses products of few tokens.
    """
    if recipe.base in ("nf4", "fp4"):
        return replace(recipe, accumulation=around.batches)
    length, shorter = CHECKED[around.alignment]
    window = getattr(models.config(recipe.model), "sliding_window", None)
    if window and not around.inside:
        length += -(-window // ALIGNED) * ALIGNED
    elif window and window < length:
        length = shorter
    if window and around.inside and window < length:
        raise ValueError(f"no length of the check is within a window of {window}")
    batch = 1 if around.one_sequence else CHECKED_BATCH
    return replace(recipe, batch_size=batch, seq_len=length, accumulation=around.batches)


# ---------------------------------------------------------------------- layers that repeat


def layers_of(recipe: Recipe) -> Layers | None:
    """How the layers of a recipe's model repeat, so that shallow models stand for it."""
    config = models.config(recipe.model)
    layers = getattr(config, "num_hidden_layers", 0)
    if layers < 2 or (getattr(config, "num_decoder_layers", None) or layers) != layers:
        return None
    if recipe.ranks > 1 and recipe.sharding not in FULLY_SHARDED:
        return None  # DDP's buckets go across layers, and ZeRO 1 chooses among all weights
    if not set(recipe.freeze) <= {"embeddings", "backbone"}:
        return None  # single layers may be named
    with torch.device("meta"):
        full = _described(models.build(config, recipe.task))
        full = {name: stack for name, stack in full.items() if len(stack) == layers}
        kinds = zip(*full.values(), strict=True)
        found = full and repeats([tuple(map(str, layer)) for layer in kinds])
        if not found:
            return None
        for patterns in SHALLOW[0]:
            number = found.number(patterns)
            short = models.build(models.with_layers(config, number), recipe.task)
            stacks = _described(short)
            for name, stack in full.items():
                pattern = stack[found.before : found.before + found.period]
                after = stack[layers - found.after :]
                if stacks.get(name) != stack[: found.before] + pattern * patterns + after:
                    return None
    return found


def repeats(kinds: list) -> Layers | None:
    """How a list repeats, by the shortest pattern that most of it is made of."""
    best, most = None, 0
    for period in range(1, min(LONGEST_PATTERN, len(kinds) // 3) + 1):
        start = 0
        while start < len(kinds):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            patterns = (end - start) // period
            if patterns >= 3 and patterns * period > most:
                most = patterns * period
                best = Layers(start, period, len(kinds) - start - most)
            start = max(start + 1, end - period + 1)
        if best and most == len(kinds):
            break
    return best


def _described(model) -> dict[str, list]:
    """By the name of each list of modules, a description of every module in it."""
    return {
        name: [_description(layer) for layer in stack]
        for name, stack in model.named_modules()
        if isinstance(stack, torch.nn.ModuleList)
    }


def _description(layer):
    """Classes, plain settings and shapes inside a layer, without its number."""
    plain = (bool, int, float, str, type(None))
    return [
        (
            name,
            type(module).__name__,
            {
                k: v
                for k, v in vars(module).items()
                if isinstance(v, plain) and k not in ("layer_id", "layer_idx")
            },
            [(key, value.shape, value.dtype) for key, value in module.named_parameters()],
        )
        for name, module in layer.named_modules()
    ]
