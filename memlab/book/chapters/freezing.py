"""Layers to freeze by pressing them: how far backward goes, and the bytes that each one keeps."""

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass

from memlab import models
from memlab.book.panel import Panel
from memlab.footprint import Category, Footprint, Phase
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe

DEPTH = 4  # layers that are simulated to know all of a model's
FROZEN = 2  # of them, where it matters what a frozen layer keeps


@dataclass(frozen=True)
class Part:
    """The embeddings, a layer or the head, in bytes.

    trains: activations that it keeps for backward if it trains, its own input included. passes:
    what it keeps if it is frozen and something below it trains; with nothing to train below it
    keeps nothing. gradients, states: what it has of them if it trains.
    """

    name: str
    parameters: int
    gradients: int
    states: int
    trains: int
    passes: int


class FreezingPanel(Panel):
    """Freeze parts of a model: activations, gradients and optimizer states that are left.

    source: the parts from the first to the last; or a recipe, from which they are derived; without
        one it is BERT-large with 8 sequences of 512 tokens.

    Of a recipe two steps of few layers at full width are simulated, once with the first layers
    frozen and once with the head. What a layer keeps does not depend on the depth, so all other
    choices are sums; a third simulation checks one, to the byte.

    Raises ValueError without parts, and for a recipe whose layers are no such sum: because a
    weight is shared, or because autocast, checkpointing or adapters change what is kept.
    """

    kind = "freezing"
    still = "This panel needs scripts. It shows what a model keeps when parts of it are frozen."

    def __init__(self, source: Recipe | list[Part] | None = None):
        if source is None:
            source = Recipe("bert-large", batch_size=8, seq_len=512)
        self.title = "a model"
        if isinstance(source, Recipe):
            length = source.seq_len or models.max_length(source.model)
            self.title = f"{source.model}, {source.batch_size} x {length} tokens"
            source = derived(source)
        self.parts = list(source)
        if not self.parts:
            raise ValueError("source is empty: allowed are a recipe and one or more parts")

    def totals(self, frozen: Collection[str]) -> dict[str, int]:
        """Bytes of each kind with the parts of these names frozen, as the page shows them."""
        return totals(self.parts, frozen)

    def data(self) -> dict:
        return {"parts": [asdict(part) for part in self.parts], "title": self.title}

    def __repr__(self) -> str:
        return f"FreezingPanel of {self.title}"


def totals(parts: list[Part], frozen: Collection[str]) -> dict[str, int]:
    """Bytes with some parts frozen: parameters, activations, gradients, states, and two sums.

    before: parameters, states and activations, when forward has ended. after: parameters, states
    and gradients, when backward has ended.
    """
    below, activations, gradients, states = False, 0, 0, 0
    for part in parts:
        if part.name not in frozen:
            below = True
            activations += part.trains
            gradients += part.gradients
            states += part.states
        elif below:
            activations += part.passes
    weights = sum(part.parameters for part in parts)
    return {
        "parameters": weights,
        "activations": activations,
        "gradients": gradients,
        "states": states,
        "before": weights + states + activations,
        "after": weights + states + gradients,
    }


def derived(recipe: Recipe) -> list[Part]:
    """The parts of a recipe's model, from simulations of few layers at full width."""
    shallow = recipe.but(model=models.with_layers(recipe.model, DEPTH))
    partly = _Held(simulate(shallow.but(freeze=(FROZEN,))))
    layer, above = partly.layers[:2], partly.layers[FROZEN]
    passes = layer[0]["activations"]  # its output is not kept, as the next one is frozen, too
    inputs = layer[1]["activations"] - passes
    one = Part("layer", above["parameters"], above["gradients"], above["states"],
               above["activations"], passes)  # fmt: skip
    ends = {"embeddings": partly.first, "head": partly.last}
    first, last = (Part(name, *of.values(), 0) for name, of in ends.items())
    last_input = partly.layers[-1]["activations"] - (one.trains - inputs)
    still = _Held(simulate(shallow.but(freeze=partly.head)))
    last = Part("head", last.parameters, last.gradients, last.states, last.trains + last_input,
                still.last["activations"])  # fmt: skip
    # A layer's output is the next one's input, and the trace gives it to the layer that made it.
    few = [first, *(Part(f"layer {n}", *_numbers(one)) for n in range(1, DEPTH + 1)), last]
    names = {
        "embeddings": "embeddings",
        "layer 1": 1,
        f"layer {DEPTH - 1}": partly.paths[DEPTH - 2],
    }
    check = _Held(simulate(shallow.but(freeze=tuple(names.values()))))
    if totals(few, names) != check.totals():
        raise ValueError(
            f"model is {recipe.model}: its parts are no sum under this recipe (a shared weight, "
            "autocast, checkpointing, adapters); allowed are plain trainings of equal layers"
        )
    depth = models.config(recipe.model).num_hidden_layers
    return [first, *(Part(f"layer {n}", *_numbers(one)) for n in range(1, depth + 1)), last]


def _numbers(part: Part) -> tuple[int, ...]:
    return part.parameters, part.gradients, part.states, part.trains, part.passes


class _Held:
    """What a simulated step holds, by part: activations at the end of forward, the others after.

    first, last: of the embeddings and of the head. head: the names of its modules with weights.
    paths: the path of each layer.
    """

    def __init__(self, run: Footprint):
        line = run.timeline
        forward = line.phases.index(Phase.BACKWARD) - 1
        backward = len(line.phases) - 1 - line.phases[::-1].index(Phase.BACKWARD)
        kinds = {
            "parameters": (Category.PARAMETERS, forward),
            "gradients": (Category.GRADIENTS, backward),
            "states": (Category.OPTIMIZER_STATES, backward),
            "activations": (Category.ACTIVATIONS, forward),
        }
        self.first, self.last = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
        self.layers = [dict.fromkeys(kinds, 0) for _ in range(DEPTH)]
        weights = [x for x in line.lives if x.category == Category.PARAMETERS]
        places = [self._layer(life) for life in weights]
        begin = places.index(0)
        before = {life.module for life in weights[:begin]}
        self.head = tuple({x.module: 0 for x, n in zip(weights, places, strict=True) if n is None}
                          .keys() - before)  # fmt: skip
        self.paths = [self._path(n, weights) for n in range(DEPTH)]
        made = [x.born for x in line.lives if self._layer(x) == 0 and x.category != "parameters"]
        start = min(born for born in made if born > 0)
        for name, (category, moment) in kinds.items():
            for life in line.alive(moment):
                if life.category != category:
                    continue
                number = self._layer(life)
                if number is not None:
                    self.layers[number][name] += life.nbytes
                elif name == "activations":
                    (self.first if life.born < start else self.last)[name] += life.nbytes
                else:
                    (self.first if life.module in before else self.last)[name] += life.nbytes

    @staticmethod
    def _layer(life) -> int | None:
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", life.module)
        return int(number[1]) if number else None

    def _path(self, number, weights) -> str:
        module = next(life.module for life in weights if self._layer(life) == number)
        return re.search(rf"^(.*?(?:^|\.){number})(?:\.|$)", module)[1]

    def totals(self) -> dict[str, int]:
        """As `totals` of parts, of what was simulated."""
        everything = [self.first, *self.layers, self.last]
        found = {name: sum(of[name] for of in everything) for name in self.first}
        held = found["parameters"] + found["states"]
        found["before"], found["after"] = held + found["activations"], held + found["gradients"]
        return found
