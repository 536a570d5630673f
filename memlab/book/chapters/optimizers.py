"""Optimizers: what their states and steps take, small trainings, and the figures of it."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.utils._pytree import tree_leaves

from memlab import models
from memlab.book import show
from memlab.book.lessons import QUIET, shuffled_blocks, small_config, train_on, trainer_losses
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import find_records
from memlab.footprint import Footprint
from memlab.predict.measure import pick_device
from memlab.spec.recipe import Recipe

Make = Callable[..., Any]  # an optimizer, from parameters and a rate `lr`


def muon(named: Sequence[tuple[str, torch.nn.Parameter]], lr: float) -> SimpleNamespace:
    """Muon for matrices inside of layers, AdamW for the rest; steps like an optimizer."""
    inner, outer = [], []
    for name, p in named:
        (inner if p.ndim == 2 and re.search(r"\.\d+\.", name) else outer).append(p)
    # With this option a rate means what it means to AdamW.
    first = torch.optim.Muon(inner, lr, adjust_lr_fn="match_rms_adamw")
    both = first, torch.optim.AdamW(outer, lr, fused=True)
    return SimpleNamespace(
        step=lambda: [one.step() for one in both],
        zero_grad=lambda: [one.zero_grad() for one in both],
    )


def narrow_bars(rows: Mapping[str, Footprint], limit: str) -> Figure:
    """`show.bars` for a phone, without seconds, with a legend of two columns."""
    fig = show.bars({n: replace(run, step_time=None) for n, run in rows.items()}, limit=limit)
    fig.set_size_inches(4.8, 1.6 + 0.4 * len(rows))
    fig.legends[0].remove()
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def bytes_a_weight(steps: Mapping[str, Footprint]) -> pd.DataFrame:
    """Of steps in fp32 alone: bytes a weight of states and borrowed; ms, estimated, with a range.

    A row a step; `low` and `high` are the ends of the estimate `ms`.
    """
    rows = {}
    for name, run in steps.items():
        count = run.breakdown["parameters"] / 4
        kinds = {"states": "optimizer_states", "borrowed": "temporary"}
        rows[name] = {label: run.breakdown[kind] / count for label, kind in kinds.items()}
        time = run.step_seconds
        each = {"low": time.low, "ms": time.expected, "high": time.high}
        rows[name] |= {label: 1e3 * found for label, found in each.items()}
    return pd.DataFrame(rows).T


def bytes_bars(frame: pd.DataFrame) -> Figure:
    """States and what the step borrows, of `bytes_a_weight`, as bars."""
    fig, ax = show.figure(4.8, 3.8)
    hues = show.COLOURS["optimizer_states"], show.COLOURS["temporary"]
    states, borrowed = frame["states"], frame["borrowed"]
    ax.barh(frame.index, states, label="states", color=hues[0])
    ax.barh(frame.index, borrowed, left=states, label="borrowed by the step", color=hues[1])
    for y, (kept, more) in enumerate(zip(states, borrowed, strict=True)):
        ax.text(kept + more + 0.15, y, f"{kept:.1f} + {more:.1f}", va="center")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="bytes a weight", xlim=(0, 15))
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def weights_after(make: Make, lr: float = 1e-3) -> torch.Tensor:
    """All weights of a tiny Llama after five steps with an optimizer, as one vector."""
    model = models.build("llama-3.2-1b-tiny").to(pick_device())
    optimizer = make(model.parameters(), lr)
    torch.manual_seed(0)
    ids = torch.randint(1000, (4, 32)).to(pick_device())
    train_on(model, optimizer, [ids] * 5)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far `weights_after` lie from another's, as a share of the way that the other went."""
    start = weights_after(torch.optim.SGD, lr=0.0)
    return ((one - other).norm() / (other - start).norm()).item()


def formats_after_step(make: Make) -> dict[str, torch.dtype]:
    """Formats of a weight, its gradient and an optimizer's tensors of it, by their names."""
    model = models.build("bert-large-tiny").to(pick_device())
    optimizer = make(model.parameters())
    ids = torch.ones(2, 8, dtype=torch.long, device=pick_device())
    model(input_ids=ids, labels=ids[:, 0]).loss.backward()
    optimizer.step()
    weight = model.bert.pooler.dense.weight
    found = {name: x.dtype for name, x in optimizer.state[weight].items() if torch.is_tensor(x)}
    return {"weight": weight.dtype, "gradient": weight.grad.dtype} | found


def newer_states() -> pd.DataFrame:
    """Bytes a weight and GiB of optimizer states for Llama 3.2 1B, by arithmetic from its shapes.

    `attrs["outer"]` is the share of its weights outside of the layers' matrices.
    """
    with torch.device("meta"):
        llama = dict(models.build("llama-3.2-1b").named_parameters())
    inner = [p.shape for n, p in llama.items() if p.ndim == 2 and ".layers." in n]
    in_all = sum(p.numel() for p in llama.values())
    outer = in_all - sum(m * n for m, n in inner)
    rows, r = sum(len(p) for p in llama.values() if p.ndim == 2), 512

    def of_inner(numbers):  # fp32 states of inner matrices, AdamW elsewhere
        return 4 * sum(numbers(min(s), max(s)) for s in inner) + 8 * outer

    needs = {
        "AdamW, schedule-free AdamW": 8 * in_all,
        "Muon": of_inner(lambda m, n: m * n),
        "Adam-mini": 4 * (in_all + rows),  # one second moment a row
        "GaLore, rank 512": of_inner(lambda m, n: 2 * r * n + r * m),
        "APOLLO, rank 512": of_inner(lambda m, n: 2 * r * n),
        "APOLLO-Mini": of_inner(lambda m, n: 2 * n),
        "8-bit AdamW": 2 * (1 + 4 / 256) * in_all,
        "4-bit AdamW": 2 * (1 / 2 + 4 / 128) * in_all,
    }
    frame = pd.DataFrame({"bytes a weight": needs}) / in_all
    frame["GiB"] = [n / 2**30 for n in needs.values()]
    frame.attrs["outer"] = outer / in_all
    return frame


def published_savings() -> pd.DataFrame:
    """Three printed runs of BERT-large on a V100: bytes of the card, seconds, bytes a weight saved
    against vanilla, which is AdamW."""
    runs = {run.name: run for run in find_records("published")}
    names = ["vanilla", "adafactor", "8-bit adam"]
    frame = pd.DataFrame({n: runs[n].figures for n in names}).T
    with torch.device("meta"):
        count = sum(p.numel() for p in models.build("bert-large").parameters())
    frame["saved"] = (frame["device_used_bytes"]["vanilla"] - frame["device_used_bytes"]) / count
    return frame


def torchtune_in_backward() -> tuple[float, float, float]:
    """GiB on an A100 without and with a step in backward, and of Llama 3.2 3B's gradients."""
    tune = {run.name: run.figures for run in find_records("published")}
    names = "+ Activation Checkpointing", "+ Fuse optimizer step into backward"
    without, within = (tune[n]["peak_active_bytes"] / 2**30 for n in names)
    with torch.device("meta"):
        count = sum(p.numel() for p in models.build("llama-3.2-3b").parameters())
    return without, within, 2 * count / 2**30


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


def learning_bands(curves: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """The mean of the seeds of each optimizer, and the band from the lowest to the highest."""
    fig, ax = show.figure(4.8, 3.4)
    for hue, (name, runs) in zip(show.COLOURS.values(), curves.items(), strict=False):
        every = torch.tensor(runs).unfold(1, 5, 1).mean(-1)  # of five steps
        steps = range(5, 5 + every.shape[1])
        style = "--" if name == "8-bit AdamW" else "-"
        ax.plot(steps, every.mean(0), style, label=name, color=hue, lw=2)
        ax.fill_between(steps, every.amin(0), every.amax(0), color=hue, alpha=0.2, lw=0)
    ax.set(xlabel="step", ylabel="loss, nats a token")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


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


def held_for(make: Make, *shape: int) -> float:
    """Bytes of state a weight after a step, for one matrix of this shape on a simulated card."""
    with SimulatedGPU():
        matrix = torch.nn.Parameter(torch.empty(shape, device="cuda"))
        matrix.grad = torch.empty_like(matrix)
        optimizer = make([matrix], lr=1e-3)
        optimizer.step()
        return state_bytes(optimizer)


def trained_by_trainer(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """(model, optimizer) after three steps of a transformers Trainer with a recipe's optimizer.

    What the Trainer tells bitsandbytes of the embeddings is forgotten at the end.
    """
    from bitsandbytes.optim import GlobalOptimManager
    from transformers import Trainer

    text = [dict(input_ids=b, labels=b) for b in blocks()[:48].tolist()]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe("gpt2-tiny", batch_size=2, seq_len=32, optimizer=name)
        more: dict[str, Any] = dict(max_steps=3, learning_rate=1e-3, **QUIET)
        trainer = Trainer(reader(0), recipe.training_arguments(folder, **more), train_dataset=text)
        trainer_losses(trainer)
    GlobalOptimManager.get_instance().initialize()
    return trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer)
