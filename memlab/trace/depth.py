"""From the memory log of shallow models to the log of a deep one.

The layers of a transformer are alike, so a deeper model does the same things in the same order,
only more often: in the log of its training each stage (building, forward, backward, every list
of the optimizer step ...) has one block of events more for each layer more. The blocks are found
by comparing the logs of the same model with one, two and three layers, or with two, three and four
where a model of one layer is another kind. Nothing is fitted: the log at full depth is written out
event by event and an allocator serves it like any other, so peaks, reserved memory, timeline and
running out of memory come out as at full depth.

Where layers differ, or three logs do not agree on the blocks, there is no answer and the model has
to run at its full depth.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from memlab import models
from memlab.recipe import FULLY_SHARDED, Recipe
from memlab.trace.events import Step
from memlab.trace.log import Log

SHALLOW = (2, 3, 4)  # first and last layers are often special; 3 has one ordinary layer, 4 two
FEWEST = (1, 2, 3)  # two thirds of the work, where the first and the last layer are ordinary ones
DEEP = 12  # up to so many layers the model itself is as quick


def log_at_full_depth(
    recipe: Recipe, record: Callable[[Recipe], Log], run: Callable = map
) -> Log | None:
    """The log of a deep recipe, or None where the model has to run itself.

    record: runs a recipe and returns its `Log`. run: a function like `map`, for all of them.
    """
    logs: dict[int, Log] = {}
    for depths in shallow_depths(recipe):
        missing = [number for number in depths if number not in logs]
        try:
            found = run(record, [with_layers(recipe, number) for number in missing])
            logs |= zip(missing, found, strict=True)
        except ValueError:
            return None  # said at full depth, about the model that was asked for
        three = [logs[number] for number in depths]
        log = extended(three, models.config(recipe.model).num_hidden_layers, depths[1])
        if log is not None:
            return log
    return None


def with_layers(recipe: Recipe, number: int) -> Recipe:
    """The recipe for a model of so many layers."""
    return replace(recipe, model=models.with_layers(recipe.model, number))


def shallow_depths(recipe: Recipe) -> list[tuple[int, ...]]:
    """The numbers of layers that may stand for the recipe's, the least work first.

    Empty where the model is not deep or layers differ.
    """
    config = models.config(recipe.model)
    layers = getattr(config, "num_hidden_layers", 0)
    if layers <= DEEP or (getattr(config, "num_decoder_layers", None) or layers) != layers:
        return []
    if recipe.ranks > 1 and recipe.sharding not in FULLY_SHARDED:
        return []  # DDP's buckets go across layers, and ZeRO 1 chooses among all weights
    if not set(recipe.freeze) <= {"embeddings", "backbone"}:
        return []  # single layers may be named
    with torch.device("meta"):
        full = layer_stacks(models.build(config, recipe.task))

        def stands_for_it(number):
            short = models.build(models.with_layers(config, number), recipe.task)
            return alike(full, layers, layer_stacks(short), number)

        # Ranks fetch a layer's weights while another one is at work, so layers have neighbours.
        tried = (SHALLOW,) if recipe.ranks > 1 else (FEWEST, SHALLOW)
        return [depths for depths in tried if all(map(stands_for_it, depths))]


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


def extended(logs: list[Log], layers: int, middle: int = SHALLOW[1]) -> Log | None:
    """The log with so many layers, from three; None where they disagree.

    logs: of a layer less than `middle`, of so many, and of one more.
    """
    blocks, (_, three, _), kinds = agreed_growth(logs)
    if blocks is None:
        return None
    more = layers - middle
    steps = [kinds[i] for i in repeated(three, blocks, more)]
    weights = deeper([log.weights for log in logs], more)
    work = deeper([log.work for log in logs], more)
    if weights is None or work is None:
        return None
    return Log(steps, weights, logs[-1].assumptions, work)


def deeper(counts: list[Counter], more: int) -> Counter | None:
    """What is counted with so many layers more than 3, from 2, 3 and 4; None if they disagree."""
    two, three, four = counts
    kinds = {*two, *three, *four}
    if any(four[kind] - three[kind] != three[kind] - two[kind] for kind in kinds):
        return None
    return Counter({kind: three[kind] + more * (four[kind] - three[kind]) for kind in kinds})


def agreed_growth(logs: list[Log]):
    """(blocks, the steps of each log as an array of numbers, the steps they stand for).

    The blocks are what the log with 4 layers has more than the one with 3, and the one with 3 more
    than the one with 2; None where these differ.
    """
    numbers: dict[Step, int] = {}
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
