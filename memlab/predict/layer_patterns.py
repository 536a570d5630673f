"""How the layers of a model repeat, so that shallow models stand for a deep one.

The layers of a transformer are alike, or repeat in a pattern, with single ones before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlab import models
from memlab.spec.recipe import FULLY_SHARDED
from memlab.spec.serving import Workload

if TYPE_CHECKING:
    import torch

FEWEST = (1, 2, 3)  # patterns that are enough where the first layer is no kind of its own
LONGEST_PATTERN = 12  # layers


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


def layers_of(recipe: Workload) -> Layers | None:
    """How the layers of a recipe's model repeat, so that shallow models stand for it."""
    config = models.config(recipe.model)
    layers = getattr(config, "num_hidden_layers", 0)
    if layers < 2 or (getattr(config, "num_decoder_layers", None) or layers) != layers:
        return None
    if recipe.ranks > 1 and recipe.sharding not in FULLY_SHARDED:
        return None  # DDP's buckets go across layers, and ZeRO 1 chooses among all weights
    if not set(recipe.freeze) <= {"embeddings", "backbone"}:
        return None  # single layers may be named
    full = _described(models.skeleton(config, recipe.task))
    full = {name: stack for name, stack in full.items() if len(stack) == layers}
    kinds = zip(*full.values(), strict=True)
    repetition = full and repeats([tuple(map(str, layer)) for layer in kinds])
    if not repetition:
        return None
    for patterns in FEWEST:
        number = repetition.number(patterns)
        short = models.skeleton(models.with_layers(config, number), recipe.task)
        stacks = _described(short)
        for name, stack in full.items():
            pattern = stack[repetition.before : repetition.before + repetition.period]
            after = stack[layers - repetition.after :]
            if stacks.get(name) != stack[: repetition.before] + pattern * patterns + after:
                return None
    return repetition


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


def _described(model: torch.nn.Module) -> dict[str, list]:
    """By the name of each list of modules, a description of every module in it."""
    from torch.nn import ModuleList

    return {
        name: [_description(layer) for layer in stack]
        for name, stack in model.named_modules()
        if isinstance(stack, ModuleList)
    }


def _description(layer: torch.nn.Module) -> list[tuple]:
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
