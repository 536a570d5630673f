"""Newer rules compared, multi-tensor steps, embeddings in 8 bits: below the optimizers' chapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from statistics import fmean
from typing import Any

import bitsandbytes as bnb
import pandas as pd
import torch
from bitsandbytes import functional as blocked
from pandas.io.formats.style import Styler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab import models
from memlab.book.lessons import in_turns, shuffled_blocks, small_config, train_on
from memlab.card.device import SimulatedGPU
from memlab.footprint import Footprint
from memlab.gpus import find_gpu
from memlab.predict.measure import device_name, pick_device
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB

Rule = Callable[..., None]  # of a weight, its gradient, what it remembers, and a rate
Forms = Mapping[str, Mapping[str, bool]]  # of AdamW's step: arguments by name
Make = Callable[..., Any]  # an optimizer, from parameters and a rate `lr`
SMALL, LARGE = [(64,)] * 400, [(2**20,)] * 2  # weights of a model


@cache
def blocks() -> torch.Tensor:
    """Blocks of 32 token ids of this book's pages, on the device that is here."""
    return shuffled_blocks(length=32)[1].to(pick_device())


def reader(seed: int) -> torch.nn.Module:
    """A GPT-2 of one layer for `blocks`."""
    sizes = dict(vocab_size=512, n_positions=32, n_embd=64, n_layer=1, n_head=2)
    config = small_config("gpt2-tiny", **sizes, initializer_range=0.1, tie_word_embeddings=False)
    return models.build(config, attention="sdpa", seed=seed).to(pick_device())


def learn(make: Make, lr: float | None, seed: int, steps: int = 35) -> list[float]:
    """Losses of a reader; the seed is of its weights and of the order of the text."""
    model = reader(seed)
    optimizer = make(model.named_parameters(), lr=lr)
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(blocks()), (steps, 16), generator=draw)
    return train_on(model, optimizer, [blocks()[rows] for rows in chosen])


def end_of(losses: Sequence[float]) -> float:
    """The mean of the last ten losses, infinite for a run that ended as NaN."""
    end = fmean(losses[-10:])
    return end if math.isfinite(end) else math.inf


def best_rate(make: Make, start: int) -> float:
    """The rate 10 ** (k / 2) with the best end, sought from k = start to where ends rise again."""
    ends: dict[int, float] = {}
    best = start
    while not {best - 1, best, best + 1} <= ends.keys():
        for k in {best - 1, best, best + 1} - ends.keys():
            ends[k] = end_of(learn(make, 10 ** (k / 2), seed=3))
        best = min(ends, key=ends.__getitem__)
    return 10 ** (best / 2)


def state_bytes(
    optimizer: torch.optim.Optimizer, weights: Iterable[torch.nn.Parameter] = ()
) -> float:
    """Bytes a weight of all state tensors but the shared tables of 8-bit optimizers.

    weights: those that count; all, if none are given.
    """
    every = (p for group in optimizer.param_groups for p in group["params"])
    own = {p: optimizer.state.get(p, {}) for p in weights or every}
    held = [s for state in own.values() for k, s in state.items() if not k.startswith("qmap")]
    tensors = filter(torch.is_tensor, tree_leaves(held))
    return sum(t.nbytes for t in tensors) / sum(p.numel() for p in own)


class Rules(torch.optim.Optimizer):
    """One rule for the matrices inside GPT-2's layers, another for the rest."""

    def __init__(
        self, named: Iterable[tuple[str, torch.nn.Parameter]], lr: float, inner: Rule, outer: Rule
    ) -> None:
        named = list(named)
        super().__init__([p for _, p in named], {"lr": lr})
        self.inner = {p for name, p in named if p.ndim == 2 and ".h." in name}
        self.rules = [inner if p in self.inner else outer for _, p in named]

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for p, rule in zip(group["params"], self.rules, strict=True):
            rule(p, p.grad, self.state[p], group["lr"])


def compared(rules: Mapping[str, Rule], outer: Rule, seeds: int = 3) -> pd.DataFrame:
    """Short trainings of a reader, a row a rule of its inner matrices; `outer` has the rest.

    Columns: bytes per weight that the rule remembers of those matrices, the best rate, and the loss
    at the end of each seed.
    """
    rows = {}
    for name, rule in rules.items():
        make = partial(Rules, inner=rule, outer=outer)
        model, rate = reader(0), best_rate(make, -4)
        optimizer = make(model.named_parameters(), lr=rate)
        train_on(model, optimizer, [blocks()[:16]])
        rows[name] = {"bytes": state_bytes(optimizer, optimizer.inner), "rate": rate}
        ends = {f"seed {seed}": end_of(learn(make, rate, seed)) for seed in range(seeds)}
        rows[name] |= ends
    return pd.DataFrame(rows).T


def codes_apart() -> tuple[float, float]:
    """(share of bitsandbytes' codes that are not the nearest value of its table, how much farther
    from the number these are, in scales), on random blocks of very different size."""
    torch.manual_seed(0)
    state = torch.randn(500, 256) * torch.rand(500, 1) ** 8
    table = blocked.create_dynamic_map(signed=True)
    codes, how = blocked.quantize_blockwise(state, code=table, blocksize=256)
    scales = how.absmax[:, None]
    nearest = torch.bucketize(state / scales, (table[1:] + table[:-1]) / 2)
    far = (blocked.dequantize_blockwise(codes, how) - state).abs() / scales
    worse = far - (table[nearest] - state / scales).abs()
    return (nearest != codes).float().mean().item(), worse.max().item()


# ---------------------------------------------------------------- multi-tensor steps


class _Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Step counters are single numbers on the host, no kernels.
        self.count += any(torch.is_tensor(t) and t.dim() for t in tree_leaves(args))
        return func(*args, **(kwargs or {}))


def heap(shapes: Iterable[Sequence[int]], place: Any, **how: bool) -> torch.optim.Optimizer:
    """AdamW over weights of these shapes with gradients, after two steps."""
    weights = [torch.nn.Parameter(torch.ones(shape, device=place)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, **how)
    optimizer.step(), optimizer.step()
    return optimizer


def step_on_t4(shapes: Iterable[Sequence[int]], **how: bool) -> Footprint:
    """A step of the same alone, on a simulated T4."""
    with SimulatedGPU("T4") as gpu:
        optimizer = heap(shapes, "cuda", **how)
        gpu.reset_peak()
        optimizer.step()
    return gpu.footprint


def steps_in_forms(forms: Forms) -> pd.DataFrame:
    """AdamW's step over many small tensors and two large ones, a row a form, the first its measure.

    Columns: calls; time of both as a share of the first form's, here; ms on a T4, estimated. The
    last row times the first form once more, and shows the clock's noise.
    """
    first = next(iter(forms))
    calls, on_t4, timed = {}, {}, {}
    for name, how in forms.items():
        optimizer = heap(SMALL, pick_device(), **how)
        with _Calls() as counter:
            optimizer.step()
        calls[name] = counter.count
        on_t4[name] = 1e3 * step_on_t4(SMALL, **how).step_seconds.expected
    again = {**forms, "control": forms[first]}
    for label, shapes in {"400 x 64": SMALL, "2 x 1M": LARGE}.items():
        steps = {name: heap(shapes, pick_device(), **how).step for name, how in again.items()}
        took = in_turns(steps, rounds=9)
        timed[f"time, {label}"] = took.div(took[first], axis=0).median()
    columns = {"calls": calls} | timed | {"T4: ms, estimated": on_t4}
    return pd.DataFrame(columns, index=list(again))


def forms_table(steps: pd.DataFrame) -> Styler:
    """`steps_in_forms` as a table of the book."""
    style = dict.fromkeys(steps, "{:.2f}") | {"calls": "{:,.0f}"}
    caption = "Calls a step over 400 x 64, and time relative to the loop's; "
    caption += device_name(pick_device())
    return steps.style.format(style, na_rep="—").set_caption(caption)


def quicker_through_small(steps: pd.DataFrame) -> bool | None:
    """Whether multi-tensor steps need far fewer calls and less time over small tensors.

    steps: of `steps_in_forms`. None where the calls are fewer and this clock shows no gain.
    """
    calls, small = steps["calls"], steps["time, 400 x 64"]
    timed = steps.filter(like="time")
    noise = (timed.loc["control"] - 1).abs().max()
    if not calls["fused"] <= calls["foreach"] < calls["loop"] / 20:
        return False
    return bool(max(small["foreach"], small["fused"]) < 1 - noise) or None


def foreach_at_gpt2(forms: Forms) -> tuple[float, float]:
    """(how many times as fast as the loop foreach goes through GPT-2's weights on a T4, estimated;
    bytes per weight that it borrows)."""
    with torch.device("meta"):
        shapes = [p.shape for p in models.build("gpt2").parameters()]
    loop, foreach = (step_on_t4(shapes, **forms[name]) for name in ("loop", "foreach"))
    borrowed = foreach.breakdown["temporary"] / sum(map(torch.Size.numel, shapes))
    return loop.step_seconds.expected / foreach.step_seconds.expected, borrowed


def whole_steps(recipe: Recipe, names: Iterable[str]) -> pd.DataFrame:
    """A recipe with each optimizer on a T4 without limit: MiB, seconds, the optimizer's share."""
    rows, roomy = {}, find_gpu("T4").without_limit()
    for name in names:
        run = simulate(recipe.but(optimizer=name), roomy)
        time = run.step_seconds
        rows[name] = {"peak, MiB": run.peak_allocated / MiB, "s a step, estimated": time.expected}
        rows[name]["optimizer, %"] = 100 * time.parts["optimizer"] / time.expected
    return pd.DataFrame(rows).T


# ---------------------------------------------------------------- embeddings


def _in_8_bits(x: torch.Tensor, signed: bool) -> torch.Tensor:
    code = blocked.create_dynamic_map(signed=signed).to(x.device)
    return blocked.dequantize_blockwise(*blocked.quantize_blockwise(x, code=code, blocksize=256))


def rows_of_moments() -> pd.DataFrame:
    """A trained reader's embedding and a linear layer: how their rows differ, and what 8 bits do.

    spread: the 95th over the 5th row of the second moment; off, %: how far Adam's direction is from
    the right one after both states have gone through 8 bits.
    """
    model, rows = reader(0), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_on(model, optimizer, blocks()[:960].split(16))
    layers = {"embedding": model.transformer.wte, "linear": model.transformer.h[0].mlp.c_fc}
    for name, layer in layers.items():
        v, G = (optimizer.state[layer.weight][key] for key in ("exp_avg", "exp_avg_sq"))
        seen = G.mean(1)[G.mean(1) > 0].sort().values
        low, high = seen[len(seen) // 20], seen[-len(seen) // 20]
        right = v / (G.sqrt() + 1e-8)
        wrong = _in_8_bits(v, True) / (_in_8_bits(G, False).sqrt() + 1e-8)
        off = 100 * (wrong - right).norm() / right.norm()
        rows[name] = {"spread": (high / low).item(), "off, %": off.item()}
    return pd.DataFrame(rows).T


def words() -> torch.nn.Sequential:
    """An embedding and a linear layer, of which 8-bit states are made."""
    layers = torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512)
    return torch.nn.Sequential(*layers).to(pick_device())


def plain() -> torch.nn.Sequential:
    """The same with a linear layer in place of the embedding."""
    layers = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)
    return torch.nn.Sequential(*layers).to(pick_device())


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An 8-bit AdamW of the model, after one step."""
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    return optimizer


def bits(model: torch.nn.Sequential) -> list[int]:
    """8 or 32, for the states of each layer's weight after one step of 8-bit AdamW."""
    state = stepped(model).state
    return [8 * state[layer.weight]["state1"].element_size() for layer in model]
