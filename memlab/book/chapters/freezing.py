"""What frozen layers keep, by a panel, in toys, in BERT-large and its twin; and what goes wrong."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

import pandas as pd
import torch
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from memlab import models
from memlab.book import show
from memlab.book.lessons import in_turns, small_config, three_steps, train_step
from memlab.book.panel import Panel
from memlab.card.device import SimulatedGPU
from memlab.footprint import Category, Footprint, Phase
from memlab.predict.measure import device_name, pick_device
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB
from memlab.workloads.training import Training

DEPTH = 4  # layers that are simulated to know all of a model's
FROZEN = 2  # of them, where it matters what a frozen layer keeps
# Which of a toy's six layers train, the lowest first.
TOYS = {"all train": [True] * 6, "lower half frozen": [False] * 3 + [True] * 3}
TOYS |= {"upper half frozen": [True] * 3 + [False] * 3}
TOYS |= {"all but lowest frozen": [True] + [False] * 5}


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


# ---------------------------------------------------------------- what layers keep


def saved_tensors(output: torch.Tensor) -> dict[int, tuple[str, torch.Tensor]]:
    """Storage -> (node, tensor) of all that the graph below an output keeps for backward.

    Every node of autograd's graph refers to what its formula needs in attributes that begin with
    `_saved_`.
    """
    seen, found, todo = set(), {}, [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        for name in filter(lambda name: name.startswith("_saved_"), dir(node)):
            tensor = getattr(node, name)
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                found.setdefault(key, (node.name(), tensor))
    return found


def kept_by_layer(trains: Sequence[bool]) -> list[int]:
    """Bytes that each of len(trains) residual layers keeps for backward, without its weights.

    trains: whether a layer's weights train, the lowest first. A layer maps 64 rows of 32 numbers.
    """
    linear, gelu = torch.nn.Linear, torch.nn.GELU()
    layers = [torch.nn.Sequential(linear(32, 128), gelu, linear(128, 32)) for _ in trains]
    seen = {p.untyped_storage()._cdata for layer in layers for p in layer.parameters()}
    x, kept = torch.randn(64, 32), []
    for layer, its in zip(layers, trains, strict=True):
        x = x + layer.requires_grad_(its)(x)
        saved = {key: t for key, (_, t) in saved_tensors(x).items() if key not in seen}
        kept.append(sum(t.untyped_storage().nbytes() for t in saved.values()))
        seen |= saved.keys()
    return kept


def toys_figure(kept: Mapping[str, Sequence[int]]) -> Figure:
    """`kept_by_layer` of each of `TOYS`, in KiB; layers that are frozen have another colour."""
    fig, axes = show.figure(5.6, 4.2, nrows=2, ncols=2, sharex=True, sharey=True)
    train, rest = show.COLOURS["activations"], show.COLOURS["inputs"]
    for ax, (name, trains) in zip(axes.flat, TOYS.items(), strict=True):
        colours = [train if its else rest for its in trains]
        ax.barh(range(1, 7), [n / 1024 for n in kept[name]], color=colours)
        ax.set(title=name, xlim=(0, 80), yticks=range(1, 7))
    for ax in axes[1]:
        ax.set(xlabel="KiB kept")
    for ax in axes[:, 0]:
        ax.set(ylabel="layer")
    marks = [axes[0, 0].barh(1, 0, color=c) for c in (train, rest)]
    fig.legend(marks, ["trains", "frozen"], loc="outside lower center", ncols=2)
    return fig


def choices_table(runs: Mapping[str, Footprint], what: str) -> Styler:
    """Simulated steps of one model on one card, a row each: MiB at the peak, and operations.

    The operations are those of all matrix products, in per cent of the first run's. what: the model
    and the card, for the caption.
    """
    frame = pd.DataFrame(index=list(runs))
    frame["peak"] = [run.peak_allocated / MiB for run in runs.values()]
    for name in ("activations", "optimizer_states"):
        frame[name.replace("_", " ")] = [run.breakdown[name] / MiB for run in runs.values()]
    work = [run.step_time.flops for run in runs.values()]
    frame["operations, %"] = [100 * n / work[0] for n in work]
    return show.table(frame, f"{what}: MiB, and operations of matrix products")


def twins(rounds: int = 14) -> tuple[dict[str, tuple[Footprint, Footprint]], pd.Series]:
    """BERT-large's tiny twin, three layers, with nothing frozen and with the first ones.

    Returns (name -> step predicted for a T4 and measured here, name -> median time of a step over
    the full one's of the same round). "nothing, again" is the full step once more and is only
    timed. rounds: of timed steps in turn, after two that warm up.
    """
    config = small_config("bert-large-tiny", num_hidden_layers=3)
    full = Recipe(config, None, 8, 64, attention="sdpa", optimizer="adamw_torch_fused")
    choices = {"nothing": full}
    choices |= {f"first {n}": full.but(freeze=("embeddings", n)) for n in (1, 2, 3)}
    trainings = {name: Training(recipe, pick_device()) for name, recipe in choices.items()}
    pairs = {
        name: (simulate(choices[name], "T4"), three_steps(training)[1])
        for name, training in trainings.items()
    }
    steps = {name: training.step for name, training in trainings.items()}
    steps["nothing, again"] = Training(full, pick_device()).step
    took = in_turns(steps, rounds + 2).iloc[2:]
    return pairs, took.div(took["nothing"], axis=0).median()


def twins_table(pairs: Mapping[str, tuple[Footprint, Footprint]], took: pd.Series) -> Styler:
    """`twins`: MiB of tensors at the peak, and operations and time as shares of the full step's."""
    frame = show.live_table(pairs)[["predicted", "measured", "error"]]
    work = [run.step_time.flops for run, _ in pairs.values()]
    frame["operations"] = [n / work[0] for n in work]
    frame = frame.reindex(took.index)
    frame["time"] = took
    formats = dict.fromkeys(frame.columns, "{:.2f}") | {"error": "{:+.2%}"}
    caption = f"Twin: peak tensors in MiB, shares of the full step; {device_name(pick_device())}"
    return frame.style.format(formats, na_rep="—").set_caption(caption)


def half_frozen(start: Callable, halve: Callable | None = None) -> Footprint:
    """The second step of BERT-large with sdpa, 8 x 512, on a simulated T4, half of it frozen.

    start: freezes the first layers of a model, by their number, and gives the optimizer.
    halve: brings a model without its head, up to a layer, to a format.
    """
    with SimulatedGPU("T4") as gpu:
        model = models.build("bert-large", attention="sdpa").to("cuda")
        optimizer = start(model, 12)
        if halve:
            halve(model.base_model, 12, torch.float16)
        ids = torch.randint(1000, (8, 512), device="cuda")
        labels = torch.zeros(8, dtype=torch.long, device="cuda")
        for _ in range(2):
            train_step(model, optimizer, dict(input_ids=ids, labels=labels))
    return gpu.footprint


# ---------------------------------------------------------------- what goes on


def moved_when_frozen_late(set_to_none: bool, decay: float = 0.0) -> float:
    """How far AdamW moves a weight in 100 steps after it was frozen, relative to its size.

    set_to_none: how the last gradient before that was cleared. decay: weight decay.
    """
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=decay)
    for _ in range(3):
        adamw.zero_grad()
        net(torch.ones(1, 8)).sum().backward()
        adamw.step()
    adamw.zero_grad(set_to_none=set_to_none)
    net.requires_grad_(False)
    before = net.weight.clone()
    for _ in range(100):
        adamw.step()
    return ((net.weight - before).norm() / before.norm()).item()


def restless(asleep: bool) -> tuple[float, float]:
    """(how far two passes over one batch differ, the running mean after them) of a frozen part.

    The part is a batch normalisation and dropout in a model in train(); asleep: it is in eval().
    """
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8)
    part = torch.nn.Sequential(norm, torch.nn.Dropout(0.1)).requires_grad_(False)
    model = torch.nn.Sequential(part, torch.nn.Linear(8, 2)).train()
    part.train(not asleep)
    x = torch.randn(64, 8) + 3.0
    return (model(x) - model(x)).norm().item(), norm.running_mean.mean().item()
