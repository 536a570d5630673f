"""What stacks of layers hold and compute under checkpoints, counted on the simulated card.

A unit is the input of one layer. A way is a function of (layers, x) that runs them.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from memlab import models
from memlab.book.lessons import small_config
from memlab.card.device import SimulatedGPU
from memlab.spec.recipe import Recipe
from memlab.workloads.training import Training

Way = Callable[[torch.nn.ModuleList, torch.Tensor], torch.Tensor]
WIDTH, ROWS = 256, 4096  # of the toy layers' input
UNIT = 4 * WIDTH * ROWS  # bytes
RIGHT = {"use_reentrant": False}


def make_layers(n: int, width: int = WIDTH) -> torch.nn.ModuleList:
    """n layers that widen their input threefold, apply tanh and narrow it again."""
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    return torch.nn.ModuleList(
        torch.nn.Sequential(linear(width, 3 * width), tanh(), linear(3 * width, width))
        for _ in range(n)
    )


def run_all(layers, x):
    """Each layer after the other."""
    for layer in layers:
        x = layer(x)
    return x


class _OnDemand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers, x):
        ctx.layers = layers
        ctx.save_for_backward(x)
        return run_all(layers, x)

    @staticmethod
    def backward(ctx, grad):
        for i in reversed(range(len(ctx.layers))):
            x = run_all(ctx.layers[:i], ctx.saved_tensors[0]).detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.layers[i](x)
            torch.autograd.backward(y, grad)
            grad = x.grad
        return None, grad


def on_demand(layers, x):
    """The way that keeps the first input alone, and walks to each layer from there."""
    return _OnDemand.apply(layers, x)


def trial(way: Way, n: int):
    """The Footprint of one forward and backward of n toy layers."""
    with SimulatedGPU() as gpu:
        layers = make_layers(n).to("cuda")
        gpu.watch(layers)
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        gpu.reset_peak()
        way(layers, x).sum().backward()
    return gpu.footprint


def _units(footprint, unit: int = UNIT) -> float:
    levels = footprint.timeline.levels
    return float(np.add(levels["activations"], levels["temporary"]).max()) / unit


def held(way: Way, n: int) -> float:
    """The most units of activations and temporaries that n toy layers hold at one time."""
    return _units(trial(way, n))


def passes(way: Way, n: int, frozen: bool = False) -> float:
    """Operations of forward and backward of n toy layers, in forward passes."""
    layers, x = make_layers(n, width=8), torch.randn(4, 8)
    layers.requires_grad_(not frozen)
    with FlopCounterMode(display=False) as one:
        run_all(layers, x)
    with FlopCounterMode(display=False) as counter:
        way(layers, x.requires_grad_()).sum().backward()
    return counter.get_total_flops() / one.get_total_flops()


def prices(ways: Mapping[str, Way], n: int) -> pd.DataFrame:
    """A row a way: units held by n toy layers, and passes of work."""
    rows = {k: {"units held": held(w, n), "passes": passes(w, n)} for k, w in ways.items()}
    return pd.DataFrame.from_dict(rows, orient="index")


# ---------------------------------------------------------------- layers of real models


def _bert(n: int, attention: str, tokens: int):
    config = small_config("bert-base", num_hidden_layers=n)
    model = models.build(config, attention=attention).to("cuda")
    x = torch.randn(4, tokens, 768, device="cuda", requires_grad=True)
    return model.bert.encoder.layer, x


def _llama(n: int, attention: str, tokens: int):
    config = models.with_layers(models.config("llama-2-70b"), n)
    bf16 = torch.bfloat16
    model = models.build(config, dtype=bf16, attention=attention).to("cuda").model
    x = torch.randn(4, tokens, 8192, device="cuda", dtype=bf16)
    turned = model.rotary_emb(x, torch.arange(tokens)[None].to("cuda"))
    layers = [functools.partial(layer, position_embeddings=turned) for layer in model.layers]
    return layers, x.requires_grad_()


def stack(make, n: int, k: int, attention: str = "sdpa", tokens: int = 512) -> float:
    """Units that n layers of `make` hold in segments of k, 0 keeping everything."""
    with SimulatedGPU() as gpu:
        layers, x = make(n, attention, tokens)
        gpu.reset_peak()
        y, size = x, k or n
        for i in range(0, n, size):
            run = functools.partial(run_all, layers[i : i + size])
            y = checkpoint(run, y, **RIGHT) if k else run(y)
        y.sum().backward()
    return _units(gpu.footprint, x.nbytes)


@functools.cache
def _line(make, k: int, attention: str) -> np.poly1d:
    """Units by depth in segments of k, through two segments and four."""
    two, four = (stack(make, n * k, k, attention) for n in (2, 4))
    slope = (four - two) / (2 * k)
    return np.poly1d([slope, two - slope * 2 * k])


def kept_by_a_layer(make=_bert, attention: str = "sdpa") -> float:
    """Units that one layer more keeps, without checkpoints."""
    return (stack(make, 4, 0, attention) - stack(make, 2, 0, attention)) / 2


def pairs_from(make=_bert, attention: str = "sdpa") -> float:
    """The depth from which segments of two layers hold less than a checkpoint at each."""
    return float((_line(make, 1, attention) - _line(make, 2, attention)).roots[0])


def llama_70b() -> tuple[float, float]:
    """Units that a layer of Llama 2 70B keeps; what pairs hold of its 80 layers, as a share."""
    every, pairs = (_line(_llama, k, "sdpa")(80) for k in (1, 2))
    return kept_by_a_layer(_llama), pairs / every


# ---------------------------------------------------------------- models


def switch_on(model, arguments=None, **more) -> None:
    """The library's switch, by its name since transformers 5.23 or the older one."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(arguments or RIGHT, **more)


def owners(footprint) -> dict[str, int]:
    """Bytes of activations and temporaries at the peak, by the first part of the module's path."""
    line, found = footprint.timeline, {}
    for life in line.alive(line.peak):
        if life.category in ("activations", "temporary"):
            name = life.module.split(".")[0] or "loss"
            found[name] = found.get(name, 0) + life.nbytes
    return found


def more_work(name: str) -> float:
    """How much more a step of a model's twin computes with checkpointing, as a share."""

    def work(recipe):
        training = Training(recipe)
        with FlopCounterMode(display=False) as counter:
            training.model(**training.batches[0]).loss.backward()
        return counter.get_total_flops()

    twin = Recipe(name, batch_size=2).twin()
    return work(twin.but(checkpointing=True)) / work(twin) - 1


def selective(attention: str, contexts, tokens: int = 512) -> dict[str, float]:
    """What two layers of BERT-base hold without checkpoints, and with ones that save by `contexts`.

    kept: units without. freed: as a share of what a checkpoint at every layer frees. more work: as
    a share of the operations without.
    """
    kept, plain = _selective(attention, tokens)
    least, _ = _selective(attention, tokens, **RIGHT)
    some, more = _selective(attention, tokens, **RIGHT, context_fn=contexts)
    return {"kept": kept, "freed": (kept - some) / (kept - least), "more work": more / plain - 1}


def _selective(attention, tokens, **how) -> tuple[float, int]:
    """Units held, and operations."""

    def run(counter):
        with SimulatedGPU() as gpu:
            layers, x = _bert(2, attention, tokens)
            gpu.reset_peak()
            with counter:
                y = x
                for layer in layers:
                    y = checkpoint(layer, y, **how) if how else layer(y)
                y.sum().backward()
        return _units(gpu.footprint, x.nbytes)

    counter = FlopCounterMode(display=False)
    units = run(contextlib.nullcontext())  # the counter keeps tensors alive
    run(counter)
    return units, counter.get_total_flops()


def planned(budget: float) -> tuple[float, int]:
    """What torch.compile would save of an encoder layer, in units, and the operations of both
    graphs, at an activation memory budget."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    plan, layer = [], torch.nn.TransformerEncoderLayer(256, 4, 1024, 0.0)
    own = {tuple(sorted(weight.shape)) for weight in layer.parameters()}

    def look(graph, inputs):
        with FlopCounterMode(display=False) as counter:
            given = graph(*inputs)
        kept = [t for t in given[1:] if torch.is_tensor(t)]
        kept = [t for t in kept if tuple(sorted(t.shape)) not in own]
        plan.append((sum(t.nbytes for t in kept), counter.get_total_flops()))
        return make_boxed_func(graph)

    cut = dict(partition_fn=min_cut_rematerialization_partition)
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, **cut)
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget):
        x = torch.randn(100, 4, 256, requires_grad=True)
        torch.compile(layer, backend=backend)(x).sum().backward()
    return plan[0][0] / x.nbytes, plan[0][1] + plan[1][1]


def budgets(*given: float) -> pd.DataFrame:
    """A row a budget: units saved, and how much more work than at the first, in per cent."""
    plans = [planned(budget) for budget in given]
    rows = [(saved, 100 * (work / plans[0][1] - 1)) for saved, work in plans]
    names = [f"budget {budget}" for budget in given]
    return pd.DataFrame(rows, names, ["units saved", "more work, %"])


# ---------------------------------------------------------------- what stands beyond the chapter

OFFLOAD = {  # way -> the switch's arguments; None is `save_on_cpu` over everything
    "all kept": {},
    "save_on_cpu": None,
    "checkpointing": {"every_n_layers": 1},
    "checkpointing, offload": {"offload": True},
}
LINK, RATE = 16 * 8e9 * 128 / 130 / 8, 8.1e12  # of a T4: bytes and operations a second, at most


def _encoder(n: int, switch=None):
    """n layers of BERT-base in train mode on the card, and their input of 32 x 512 tokens."""
    config = small_config("bert-base", dropout=0.1, num_hidden_layers=n)
    model = models.build(config, attention="sdpa").to("cuda").train()
    if switch:
        switch_on(model, **switch)
    x = torch.randn(32, 512, 768, device="cuda", requires_grad=True)
    return model.bert.encoder.layer, x


def offload_trial(way: str, n: int = 6):
    """(Footprint, bytes of each tensor that autograd saves) of n layers by a way of `OFFLOAD`."""
    sizes, switch = [], OFFLOAD[way]
    with SimulatedGPU() as gpu:
        hooks = saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t)
        if switch is None:
            hooks = save_on_cpu(pin_memory=True)
        layers, x = _encoder(n, switch)
        gpu.reset_peak()
        with hooks:
            y = run_all(layers, x).sum()
        y.backward()
    return gpu.footprint, sizes


def operations(n: int = 6) -> int:
    """Of forward and backward of the same layers, without checkpoints."""
    with FlopCounterMode(display=False) as counter, SimulatedGPU():
        layers, x = _encoder(n)
        run_all(layers, x).sum().backward()
    return counter.get_total_flops()


def offload_bill() -> tuple[pd.DataFrame, float]:
    """(a row a way of `OFFLOAD`, GiB that the host pins for `save_on_cpu`).

    Seconds are the least that a T4's link and its fp32 rate allow.
    """
    tried = {way: offload_trial(way) for way in OFFLOAD}
    kept, marked = (tried[way][1] for way in ("all kept", "checkpointing"))
    sent = dict(zip(OFFLOAD, (0, sum(kept), 0, sum(marked)), strict=True))
    work = operations()
    rows = {
        way: {
            "peak, GiB": run.peak_allocated / 2**30,
            "out and back, GiB": 2 * sent[way] / 2**30,
            "on the link, s": 2 * sent[way] / LINK,
            "computing, s": work * (4 / 3 if "checkpointing" in way else 1) / RATE,
        }
        for way, (run, _) in tried.items()
    }
    pinned = sum(1 << (n - 1).bit_length() for n in kept)  # PyTorch pins powers of two
    return pd.DataFrame(rows).T, pinned / 2**30


def nested(layer, depth: int, reentrant: bool):
    """The layer under so many checkpoints, each inside the next."""
    for _ in range(depth):
        layer = functools.partial(checkpoint, layer, use_reentrant=reentrant)
    return layer


def nested_passes(depth: int, reentrant: bool, n: int = 9) -> float:
    """Operations of forward and backward of n small layers, in forward passes."""

    def way(layers, x):
        return run_all([nested(layer, depth, reentrant) for layer in layers], x)

    return passes(way, n)
