"""Find how the layers of a model repeat, so that shallow models can represent a deep one.

The layers of a transformer are all alike, or repeat in a pattern of a few layers, with single
layers before and after. The repetition is read from the modules of the model on the meta device:
their classes, plain settings and parameter shapes. It is then verified on shallow models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlab import models
from memlab.spec.recipe import FULLY_SHARDED
from memlab.spec.serving import Workload

if TYPE_CHECKING:
    import torch

# Numbers of patterns at which `layers_of` compares shallow models with the deep one. These are the
# depths to record (`trace_recorder.AGREEING_DEPTHS`), unless the first layer is a kind of its own.
FEWEST = (1, 2, 3)
LONGEST_PATTERN = 12  # layers of a pattern, at most


@dataclass(frozen=True)
class Layers:
    """How a stack of layers repeats.

    before: single layers at the front. period: layers of the repeating pattern. after: single
    layers at the end.
    """

    before: int
    period: int
    after: int

    def number(self, patterns: int) -> int:
        """The number of layers of a model with this many patterns."""
        return self.before + patterns * self.period + self.after

    def patterns(self, layers: int) -> int | None:
        """The number of patterns in this many layers; None if that is not whole, or below 1."""
        patterns, rest = divmod(layers - self.before - self.after, self.period)
        return None if rest or patterns < 1 else patterns


def layers_of(recipe: Workload) -> Layers | None:
    """How the layers of a recipe's model repeat; None if shallow models cannot represent it."""
    config = models.config(recipe.model)
    layers = getattr(config, "num_hidden_layers", 0)
    # An encoder and a decoder must grow together, because one number of patterns describes both.
    if layers < 2 or (getattr(config, "num_decoder_layers", None) or layers) != layers:
        return None
    if recipe.ranks > 1 and recipe.sharding not in FULLY_SHARDED:
        # DistributedDataParallel fills its buckets across layers. ZeroRedundancyOptimizer assigns
        # all weights of the model to ranks by their sizes.
        return None
    if not set(recipe.freeze) <= {"embeddings", "backbone"}:
        return None  # a number or names of modules can single out layers
    full = _described(models.skeleton(config, recipe.task))
    # A model may have several lists of layers (encoder and decoder). Lists of another length, such
    # as the experts of one layer, are part of the description of a layer.
    full = {name: stack for name, stack in full.items() if len(stack) == layers}
    kinds = zip(*full.values(), strict=True)
    repetition = full and repeats([tuple(map(str, layer)) for layer in kinds])
    if not repetition:
        return None
    # A model with fewer layers may be built differently. A list in its config can be cut at the
    # wrong layer, or the last layer can be special. Each shallow model must be the deep one with
    # patterns taken out.
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
    """The repetition that covers the most of a list; the shortest pattern wins a tie.

    A pattern must occur at least three times. None if there is no such pattern.
    """
    best, most = None, 0
    for period in range(1, min(LONGEST_PATTERN, len(kinds) // 3) + 1):
        start = 0
        while start < len(kinds):
            # The longest run from `start` in which each item equals the one a period before.
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            patterns = (end - start) // period
            if patterns >= 3 and patterns * period > most:
                most = patterns * period
                best = Layers(start, period, len(kinds) - start - most)
            # A longer run with this period cannot begin inside the one just found.
            start = max(start + 1, end - period + 1)
        if best and most == len(kinds):
            break
    return best


def _described(model: torch.nn.Module) -> dict[str, list]:
    """Name of each `ModuleList` -> the description of every module in the list."""
    from torch.nn import ModuleList

    return {
        name: [_description(layer) for layer in stack]
        for name, stack in model.named_modules()
        if isinstance(stack, ModuleList)
    }


def _description(layer: torch.nn.Module) -> list[tuple]:
    """The classes, plain attributes and parameter shapes inside a layer, without its index."""
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
