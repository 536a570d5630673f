"""From the memory log of shallow models to the log of a deep one.

The layers of a transformer are alike, so a deeper model does the same things in the same order,
only more often: in the log of its training each stage (building, forward, backward, every list
of the optimizer step ...) has one block of events more for each layer more. The blocks are found
by comparing the logs of the same model with two, three and four layers. Nothing is fitted: the
log at full depth is written out event by event and an allocator serves it like any other, so
peaks, reserved memory, timeline and running out of memory come out as at full depth.

Where layers differ, or the three logs do not agree on the blocks, there is no answer and the
model has to run at its full depth.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from memlab import models
from memlab.quantized import numel
from memlab.recipe import Recipe
from memlab.trace.ledger import BACKWARD, FORWARD

SHALLOW = (2, 3, 4)  # first and last layers are often special; 3 has one ordinary layer, 4 two
DEEP = 12  # up to so many layers the model itself is as quick
RESET, EMPTY_CACHE = ("reset",), ("empty cache",)


@dataclass(frozen=True)
class Log:
    """What happened to memory, told without storage numbers.

    Deaths between two births stand in the order of the births: nobody can tell the difference
    afterwards, and autocast drops its copies in the order of their addresses, another each time.

    steps: ("birth", bytes, category, phase, module, operation), the module with `*` for the number
        of its layer unless it is to be told; ("death", birth, phase, which), where `birth` is
        how the dying storage was born and `which` its place among the living ones born like it,
        from the oldest (0, 1, ...) or the youngest (-1, -2, ...), whichever is nearer, but what the
        forward pass left to the backward pass always from the youngest; RESET, where the measured
        stretch begins; EMPTY_CACHE; ("weight", name, copies), where a weight of a base has come
        to the card: `*` for the number of its layer, and how many copies in its first dtype are
        there beside it while `from_pretrained` quantizes it.
    weights: how many parameters there are of (so many elements, trainable or not).
    """

    steps: list[tuple]
    weights: Counter

    @property
    def parameters(self) -> int:
        return sum(elements * times for (elements, _), times in self.weights.items())

    @property
    def trainable_parameters(self) -> int:
        return sum(elements * times for (elements, free), times in self.weights.items() if free)

    @classmethod
    def of(cls, tracer, emptied, training, numbered=False) -> Log:
        """The log of a `Tracer`; emptied: the numbers of events before which the cache was;
        numbered: whether modules keep the number of their layer, so that layers differ."""
        marks = [(at, EMPTY_CACHE) for at in emptied] + [(tracer._start, RESET)]
        marks += _weights_loaded(tracer, training)
        marks.sort(key=lambda mark: mark[0], reverse=True)
        steps, births, living, dying = [], {}, {}, []

        def bury():
            for number, phase in sorted(dying):
                alike = living[births[number]]
                which = alike.index(number)
                undone = phase == BACKWARD and births[number][3] == FORWARD
                if undone or which > len(alike) - which:
                    which -= len(alike)
                alike.pop(which)
                steps.append(("death", births[number], phase, which))
            dying.clear()

        for at, (change, number, phase, *_) in enumerate(tracer.events):
            if dying and (change > 0 or phase != dying[-1][1] or marks and marks[-1][0] == at):
                bury()
            while marks and marks[-1][0] == at:
                steps.append(marks.pop()[1])
            if change > 0:
                module = tracer.modules[number]
                module = module if numbered else re.sub(r"\.\d+", ".*", module)
                what = tracer.categories[number], phase, module, tracer.makers[number]
                births[number] = birth = ("birth", change, *what)
                living.setdefault(birth, []).append(number)
                steps.append(birth)
            else:
                dying.append((number, phase))
        bury()
        steps += [mark for _, mark in reversed(marks)]
        weights = Counter((numel(p), p.requires_grad) for p in training.model.parameters())
        return cls(steps, weights)

    def replay(self, tracer) -> None:
        """Let a `Replay` tracer live through it. Raises what its allocator raises."""
        living = {}
        for step in self.steps:
            if step[0] == "birth":
                tracer.phase, tracer.module, tracer._maker = step[3:]
                living.setdefault(step, []).append(tracer._birth(step[1], step[2]))
            elif step[0] == "death":
                tracer.phase = step[2]
                tracer._death(living[step[1]].pop(step[3]))
            elif step is RESET:
                tracer.reset_peak()
            elif step is EMPTY_CACHE:
                tracer.allocator.empty_cache()


def _weights_loaded(tracer, training) -> list[tuple]:
    """(event, step) for every weight of a base that has come to the card."""
    recipe, marks = training.recipe, []
    places = {}
    for path, module in training.model.named_modules():
        for name, parameter in module._parameters.items():
            places.setdefault(id(parameter), (f"{path}.{name}", module))  # of tied ones the first
    for at, parameter in tracer.loaded.values():
        path, module = places[id(parameter)]
        path = re.sub(r"^base_model\.model\.|\.(base_layer|original_module)(?=\.)", "", path)
        transposed = getattr(module, "source_cls", None) is Conv1D and path.endswith("weight")
        int8 = hasattr(parameter, "SCB") and recipe.compute_dtype == "fp16"  # else it is converted
        copied = int8 or transposed
        marks.append((at, ("weight", re.sub(r"\.\d+\.", ".*.", path, count=1), int(copied))))
    return marks[::-1]  # the later of two at the same event is the last to be taken


def log_at_full_depth(recipe: Recipe, record) -> Log | None:
    """The log of a deep recipe, or None where the model has to run itself.

    record: runs a recipe and returns its `Log`.
    """
    shallow = shallow_recipes(recipe)
    if shallow is None:
        return None
    try:
        logs = [record(one) for one in shallow]
    except ValueError:
        return None  # said at full depth, about the model that was asked for
    return extended(logs, models.config(recipe.model).num_hidden_layers)


def shallow_recipes(recipe: Recipe) -> list[Recipe] | None:
    """The recipe with 2, 3 and 4 layers; None where the model is not deep or layers differ."""
    config = models.config(recipe.model)
    layers = getattr(config, "num_hidden_layers", 0)
    if layers <= DEEP or (getattr(config, "num_decoder_layers", None) or layers) != layers:
        return None
    if not set(recipe.freeze) <= {"embeddings", "backbone"}:
        return None  # single layers may be named
    with torch.device("meta"):
        full = layer_stacks(models.build(config, recipe.task))
        configs = [with_layers(config, number) for number in SHALLOW]
        for number, short in zip(SHALLOW, configs, strict=True):
            stacks = layer_stacks(models.build(short, recipe.task))
            if not alike(full, layers, stacks, number):
                return None
    return [replace(recipe, model=short) for short in configs]


def with_layers(config, layers: int):
    """A copy of a transformers config with so many layers (in an encoder and in a decoder)."""
    short, full = models.config(config), config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == full:
            setattr(short, name, value[:layers])
    short.num_hidden_layers = layers
    if getattr(short, "num_decoder_layers", None) is not None:
        short.num_decoder_layers = layers
    return short


def layer_stacks(model) -> dict[str, list]:
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
            {k: v for k, v in vars(module).items() if isinstance(v, plain) and "layer_id" not in k},
            [(key, value.shape, value.dtype) for key, value in module.named_parameters()],
        )
        for name, module in layer.named_modules()
    ]


def alike(full, layers: int, short, number: int) -> bool:
    """Whether a model of `layers` layers is one of `number` with its middle layer repeated."""
    for name, stack in full.items():
        few = short.get(name)
        if len(stack) == layers and few is not None and len(few) == number:
            middle = stack[1:-1]
            same = all(layer == middle[0] for layer in middle[1:] + few[1:-1])
            if not same or stack[0] != few[0] or stack[-1] != few[-1]:
                return False
        elif few is not None and few != stack:
            return False
    return any(len(stack) == layers for stack in full.values())


def extended(logs: list[Log], layers: int) -> Log | None:
    """The log with so many layers, from those with 2, 3 and 4; None where they disagree."""
    blocks, (_, three, _), kinds = agreed_growth(logs)
    if blocks is None:
        return None
    more = layers - SHALLOW[1]
    steps = [kinds[i] for i in repeated(three, blocks, more)]
    two, three, four = (log.weights for log in logs)
    if any(four[kind] - three[kind] != three[kind] - two[kind] for kind in four):
        return None
    return Log(steps, Counter({k: three[k] + more * (four[k] - three[k]) for k in four}))


def agreed_growth(logs: list[Log]):
    """(blocks, the steps of each log as an array of numbers, the steps they stand for).

    The blocks are what the log with 4 layers has more than the one with 3, and the one with 3 more
    than the one with 2; None where these differ.
    """
    numbers: dict[tuple, int] = {}
    two, three, four = steps = [
        np.array([numbers.setdefault(step, len(numbers)) for step in log.steps]) for log in logs
    ]
    blocks = growth(three, four)
    if blocks is not None and not np.array_equal(repeated(three, blocks, -1), two):
        blocks = None
    return blocks, steps, list(numbers)


def growth(short: np.ndarray, long: np.ndarray) -> list[tuple[int, np.ndarray]] | None:
    """What `long` has more than `short`: (place in short, block), each block a repetition.

    Both are walked together. Where they part, `long` goes on with a block that it has just had
    and `short` with what comes after; of several such blocks it is the one after which they
    agree to the end, or else longest. None if there is no such block.
    """
    blocks, i, j = [], 0, 0
    while True:
        agreed = _agreement(short[i:], long[j:])
        i, j = i + agreed, j + agreed
        if i == len(short) and j == len(long):
            return blocks
        spare = (len(long) - j) - (len(short) - i)
        best, size = (False, -1), None
        for p in range(1, min(spare, j) + 1):
            if np.array_equal(long[j - p : j], long[j : j + p]):
                after = _agreement(short[i:], long[j + p :])
                ends = i + after == len(short) and j + p + after == len(long)
                if (ends, after) > best:
                    best, size = (ends, after), p
        if size is None:
            return None
        blocks.append((i, long[j : j + size]))
        j += size


def _agreement(a, b) -> int:
    """How many first elements two arrays have in common."""
    shorter = min(len(a), len(b))
    different = a[:shorter] != b[:shorter]
    return int(different.argmax()) if different.any() else shorter


def repeated(steps, blocks, more: int) -> np.ndarray:
    """`steps` with each block `more` times more often; -1 takes one away."""
    pieces, start = [], 0
    for place, block in blocks:
        pieces.append(steps[start : place if more >= 0 else max(start, place - len(block))])
        pieces += [block] * more
        start = place
    return np.concatenate([*pieces, steps[start:]])
