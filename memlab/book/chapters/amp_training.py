"""Trainings in mixed precision: a small GPT-2 in each format, its scaler, and what goes wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from memlab import models
from memlab.book import show
from memlab.book.lessons import shuffled_blocks, small_config, train_on, train_step
from memlab.predict.measure import pick_device

# Ways to train: the format that autocast computes in.
WAYS = {"fp32": None, "bf16 autocast": torch.bfloat16}
WAYS |= {"fp16, scaled": torch.float16, "fp16, unscaled": torch.float16}
BLUE, ORANGE, RED = (show.COLOURS[n] for n in ("parameters", "gradients", "temporary"))


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """(64 blocks of 32 token ids that no training sees, all others), on the device that is here."""
    _, ids = shuffled_blocks(length=32)
    ids = ids.to(pick_device())
    return ids[:64], ids[64:]


def reader(seed: int = 0) -> torch.nn.Module:
    """A GPT-2 of one narrow layer for `text`: a CPU computes fp16 slowly."""
    sizes = dict(vocab_size=512, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    return models.build(small_config("gpt2-tiny", **sizes), seed=seed).to(pick_device())


def cast(dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to a dtype on the device that is here; None computes in fp32."""
    return torch.autocast(pick_device().type, dtype=dtype, enabled=dtype is not None)


def lost_gradients(
    gradients: Callable[..., torch.Tensor],
) -> tuple[dict[str, float], int]:
    """(share that becomes zero of gradients that fp32 has, how many become infinite).

    gradients: of a micro-batch at four million tokens a step, from a dtype and a scale. Keys of the
    shares: formats.
    """
    true, lost, infinite = gradients(None), {}, 0
    ways = {"fp16": (torch.float16, 1.0), "fp16, scale 2^16": (torch.float16, 2.0**16)}
    for name, how in (ways | {"bf16": (torch.bfloat16, 1.0)}).items():
        found = gradients(*how)
        lost[name] = (found == 0)[true != 0].double().mean().item()
        infinite += int((~found.isfinite()).sum())
    return lost, infinite


def gradient_histogram(gradients: torch.Tensor) -> Figure:
    """Sizes of gradients, as they are and times 2**16, and the range that fp16 holds."""
    sizes = gradients[gradients != 0].abs().log2()
    fig, ax = show.figure(4.8, 3)
    ax.axvspan(-24, 16, color=show.GREY, alpha=0.2)
    ax.text(-2, 0.97, "fp16 holds this", va="top", transform=ax.get_xaxis_transform())
    spread: dict[str, Any] = dict(bins=80, histtype="step", lw=2)
    ax.hist(sizes.tolist(), color=ORANGE, label="as they are", **spread)
    ax.hist((sizes + 16).tolist(), color=BLUE, label="scaled by $2^{16}$", **spread)
    ax.set(xlim=(-45, 18), yticks=[], ylabel="how many")
    ax.set(xlabel="size of a gradient, as a power of two")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def ends_above(runs: Sequence[list[float]], others: Sequence[list[float]]) -> list[float]:
    """How far each run's end (`mean_end`) lies above the other's of the same seed."""
    return [mean_end(a) - mean_end(b) for a, b in zip(runs, others, strict=True)]


def mean_end(losses: Sequence[float]) -> float:
    """The mean of the last ten losses."""
    return fmean(losses[-10:])


def ending_of(losses: Sequence[float]) -> str:
    """How a run in fp16 alone went on after its first losses, as a verb."""
    if math.isnan(losses[-1]):
        return "became NaN later"
    return "first fell and then exploded" if max(losses) > 2 * losses[0] else "came through"


def learning_lines(curves: Mapping[str, Sequence[list[float]]]) -> Figure:
    """The mean of the seeds of each way, against the step."""
    fig, ax = show.figure(4.8, 3.2)
    hues = ("parameters", "optimizer_states", "gradients", "temporary")
    for (way, runs), style, hue in zip(curves.items(), ("-", "--", ":", "-"), hues, strict=False):
        mean = [fmean(losses) for losses in zip(*runs, strict=True)]
        ax.plot(mean, style, color=show.COLOURS[hue], label=way, lw=2)
    ax.set(xlabel="optimizer step", ylabel="loss, nats a token")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def scaler_life(step: Callable[..., float], rows: torch.Tensor) -> tuple[list[float], list[int]]:
    """(the scale at each of 60 steps, the steps that were skipped), of a scaler that starts at
    2**22 and grows after 12 good steps.

    step: takes model, optimizer, scaler, batch and dtype.
    """
    model, scales, skipped = reader(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler(pick_device().type, init_scale=2.0**22, growth_interval=12)
    for number, some in enumerate(rows[:480].split(8)):
        scales.append(scaler.get_scale())
        batch = {"input_ids": some, "labels": some}
        step(model, optimizer, scaler, batch, torch.float16)
        if scaler.get_scale() < scales[-1]:
            skipped.append(number)
    return scales, skipped


def scaler_stairs(scales: Sequence[float], skipped: Sequence[int]) -> Figure:
    """The scale against the step, and the steps that were skipped."""
    fig, ax = show.figure(4.8, 2.6)
    ax.step(range(len(scales)), scales, where="mid", color=BLUE, lw=2)
    at = [scales[step] for step in skipped]
    ax.plot(skipped, at, "x", ms=9, mew=2, color=RED, label="step skipped")
    ax.set_yscale("log", base=2)
    ax.set(xlabel="step", ylabel="scale")
    ax.legend()
    return fig


def pretrained(rows: torch.Tensor, steps: int = 80) -> torch.nn.Module:
    """A reader after some steps of fp32 on the first rows."""
    model = reader()
    train_on(model, torch.optim.AdamW(model.parameters(), lr=5e-3), rows[: 8 * steps].split(8))
    return model


@torch.no_grad()
def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """The loss on some rows, computed in fp32."""
    return copy.deepcopy(model).float()(input_ids=rows, labels=rows).loss.item()


def tuned(
    model: torch.nn.Module,
    text: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    make: Callable[..., Any],
    seed: int,
    steps: int = 40,
) -> tuple[float, float]:
    """(what fine-tuning at 3e-5 takes off the loss, share of the weights that never moved).

    text: (rows that are not trained on, rows). dtype: of the weights. make: the optimizer, from a
    model and a rate.
    """
    unseen, seen = text
    model = copy.deepcopy(model).to(dtype)
    before, start = loss_of(model, unseen), copy.deepcopy(model)
    optimizer = make(model, 3e-5)
    order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)  # of the rounding
    for some in order[: 8 * steps].split(8):
        model(input_ids=seen[some], labels=seen[some]).loss.backward()
        optimizer.step()
        model.zero_grad()
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    same = torch.cat([(a == b).flatten() for a, b in pairs])
    return before - loss_of(model, unseen), same.double().mean().item()


def gains(
    ways: Mapping[str, tuple[torch.dtype, Callable[..., Any]]],
    text: tuple[torch.Tensor, torch.Tensor],
    seeds: int = 3,
) -> pd.DataFrame:
    """`tuned` in each way: a column a seed, and the mean share of weights that never moved."""
    model, rows = pretrained(text[1]), {}
    for way, how in ways.items():
        found = [tuned(model, text, *how, seed) for seed in range(seeds)]
        rows[way] = {f"seed {seed}": gain for seed, (gain, _) in enumerate(found)}
        rows[way]["never moved"] = fmean(same for _, same in found)
    return pd.DataFrame(rows).T


def gain_table(gained: pd.DataFrame) -> Styler:
    """`gains` as a table of the book."""
    style = dict.fromkeys(gained, "{:+.4f}") | {"never moved": "{:.0%}"}
    caption = "What fine-tuning takes off the loss; weights that never moved"
    return gained.style.format(style).set_caption(caption)


def learn(
    rows: torch.Tensor, way: str, seed: int, window: int = 16_384, steps: int = 36
) -> list[float]:
    """Losses of a short training in one of `WAYS`; each is divided by `window` before backward."""
    model, losses = reader(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler(pick_device().type, enabled=way == "fp16, scaled")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    for some in order[: 8 * steps].split(8):
        with cast(WAYS[way]):
            loss = model(input_ids=rows[some], labels=rows[some]).loss
        scaler.scale(loss / window).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _printed_loss(model: torch.nn.Module, rows: torch.Tensor, inside: bool) -> torch.Tensor:
    with cast(torch.float16):
        logits = model(input_ids=rows).logits[:, :-1].flatten(0, 1)
    with cast(torch.float16 if inside else None):
        return torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())


def printed_loop(
    rows: torch.Tensor, clear: bool, inside: bool = True, interval: int = 4, steps: int = 45
) -> tuple[list[float], list[float]]:
    """(losses, scales after each step) of a notebook's loop in fp16.

    clear: call `zero_grad`. inside: compute the loss under autocast. interval: good steps after
    which the scale is doubled.
    """
    model, losses, scales = reader(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler(pick_device().type, growth_interval=interval)
    for some in rows[: 8 * steps].split(8):
        loss = _printed_loss(model, some, inside)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if clear:
            optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def loss_and_gradients(
    rows: torch.Tensor, inside: bool, scale: float = 2.0**16
) -> tuple[str, bool]:
    """(format of a loss inside or outside of autocast, whether its scaled gradients are finite)."""
    model = reader()
    loss = _printed_loss(model, rows, inside)
    (loss * torch.tensor(scale, device=rows.device)).backward()
    finite = all(p.grad.isfinite().all() for p in model.parameters())
    return str(loss.dtype).removeprefix("torch."), finite


def steps_in_half(rows: torch.Tensor, **form: bool) -> list[float]:
    """Eight losses of a reader whose weights are fp16, with a form of AdamW (`foreach=True`)."""
    model = reader().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **form)
    return [train_step(model, optimizer, dict(input_ids=rows, labels=rows)) for _ in range(8)]


def refusal_of_scaler(rows: torch.Tensor) -> str:
    """What a scaler says to a model with fp16 weights; nothing if it steps."""
    model = reader().half()
    scaler = torch.amp.GradScaler(pick_device().type)
    scaler.scale(model(input_ids=rows, labels=rows).loss).backward()
    try:
        scaler.step(torch.optim.AdamW(model.parameters(), lr=1e-3))
    except ValueError as error:
        return str(error)
    return ""
