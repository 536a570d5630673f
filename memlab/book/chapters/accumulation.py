"""Gradient accumulation: its figures, a small GPT-2 whose gradients are compared, other loops."""

import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from memlab import models
from memlab.book import corpora, show
from memlab.book.chapters import published
from memlab.book.lessons import QUIET, shuffled_blocks, small_config, trainer_losses
from memlab.card.device import SimulatedGPU
from memlab.footprint import Footprint
from memlab.gpus import find_gpu
from memlab.predict.measure import Measurement, measure, pick_device
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB

Batch = dict[str, torch.Tensor]
TODAY: dict[str, Any] = dict(attention="sdpa", optimizer="adamw_torch_fused")
HUES = [show.COLOURS[n] for n in ("parameters", "temporary", "optimizer_states")]

# ---------------------------------------------------------------- figures


def idea_figure(seen: Sequence[float], whole: float) -> Figure:
    """Forward and backward passes of micro-batches, and an entry of `.grad` after each of them.

    seen: the entry, first before any pass. whole: what it is for the whole batch.
    """
    fig, (lane, ax) = show.figure(5.4, 3.2, nrows=2, sharex=True)
    count = len(seen) - 1
    passes = [("F", "#cc79a7"), ("B", "#56b4e9")] * count
    for place, (label, colour) in enumerate([*passes, ("step", "#e69f00")]):
        lane.barh(0, 0.94, left=place, color=colour, height=0.8)
        lane.text(place + 0.47, 0, label, ha="center", va="center", color="black")
    for k in range(count):
        lane.text(2 * k + 1, 0.62, f"batch {k + 1}", ha="center")
    lane.set_axis_off()
    places = [*range(0, 2 * count + 1, 2), 2 * count + 1]
    ax.step(places, [*seen, seen[-1]], where="post", lw=2.5, color=show.COLOURS["gradients"])
    ax.axhline(whole, color=show.GREY, linestyle="--")
    ax.text(0.1, whole, "all at once", va="bottom")
    ax.set(ylabel="entry of .grad", xticks=[], xlim=(0, places[-1]))
    ax.margins(y=0.25)
    return fig


def learning_figure(curves: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """`learning` against the tokens that were read: a line a seed, and the second way as dots."""
    fig, ax = show.figure(5.4, 3.4)
    looks = zip(itertools.cycle("-o-"), itertools.cycle(HUES))
    for (way, seeds), (mark, hue) in zip(curves.items(), looks, strict=False):
        for seed, losses in enumerate(seeds):
            tokens = [48 * 64 * n / 1000 for n in range(len(losses))]
            ax.plot(tokens, losses, mark, color=hue, label=None if seed else way)
    ax.set(xlabel="thousand tokens read", ylabel="held-out loss, nats")
    ax.legend()
    return fig


# ---------------------------------------------------------------- runs of full size, and of a twin


def predicted_and_measured(
    shapes: Iterable[tuple[int, int]],
) -> dict[str, tuple[Footprint, Measurement]]:
    """BERT-large's tiny twin, 128 tokens, without dropout, simulated and trained here.

    shapes: micro-batches and how many of them make a step; the labels are such as "2 x 4".
    """
    quiet, pairs = small_config("bert-large-tiny"), {}
    for size, count in shapes:
        recipe = Recipe(quiet, None, size, 128, count, **TODAY)
        pairs[f"{size} x {count}"] = simulate(recipe), measure(recipe, steps=1)
    return pairs


def guide_runs() -> pd.DataFrame:
    """A guide's BERT-large on a V100 as 4 x 1 and as 1 x 4, a row each, with today's kernels.

    Bytes of the card, `simulated` and `published`; `seconds`, published; `samples/s`, estimated.
    """
    runs = published.guide_runs("vanilla", "accumulation").drop(columns="samples/s")
    runs = runs.rename({"vanilla": "4 x 1", "accumulation": "1 x 4"})
    runs = runs.rename(columns={"s": "seconds", "rate": "samples/s"})
    return runs[["simulated", "published", "seconds", "samples/s"]].astype(float)


def beside_checkpointing() -> pd.DataFrame:
    """16 sequences a step of two models on a T4 with room, accumulated or under checkpoints.

    `peak`, MiB; `s a step`, estimated.
    """
    bert = Recipe("bert-large", batch_size=16, seq_len=512, **TODAY)
    large = Recipe("gpt2-large", seq_len=1024, accumulation=16, **TODAY)
    recipes = {
        "8 x 2": bert.but(batch_size=8, accumulation=2),
        "1 x 16": bert.but(batch_size=1, accumulation=16),
        "16 x 1, checkpointed": bert.but(checkpointing=True),
        "GPT-2 large": large,
        "GPT-2 large, checkpointed": large.but(checkpointing=True),
    }
    card = find_gpu("T4").without_limit()
    runs = {name: simulate(recipe, card) for name, recipe in recipes.items()}
    rows = [(run.peak_allocated / MiB, run.step_seconds.expected) for run in runs.values()]
    return pd.DataFrame(rows, index=list(runs), columns=["peak", "s a step"])


# ---------------------------------------------------------------- a small GPT-2


@cache
def _text() -> tuple[Any, torch.Tensor]:
    tokenizer, ids = shuffled_blocks(length=64)
    return tokenizer, ids.to(pick_device())


def blocks() -> torch.Tensor:
    """Token ids [blocks, 64] of this book's pages, on the device that is here."""
    return _text()[1]


def paragraphs(count: int) -> Batch:
    """Paragraphs of the same text as they come, padded, with the label -100 for padding."""
    tokenizer, ids = _text()
    texts = [p for page in corpora.pages()["text"][:8] for p in page.split("\n\n")][:count]
    padded = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=128)
    words = padded["input_ids"]
    labels = words.masked_fill(padded["attention_mask"] == 0, -100)
    return {"input_ids": words.to(ids.device), "labels": labels.to(ids.device)}


def reader(dropout: float = 0.0, seed: int = 0) -> torch.nn.Module:
    """A GPT-2 of two layers for `blocks` and `paragraphs`; the seed is of its weights."""
    config = small_config("gpt2-tiny", dropout, vocab_size=512)
    return models.build(config, seed=seed).to(pick_device())


def split(batch: Batch, count: int) -> list[Batch]:
    """A batch cut into `count` micro-batches."""
    parts = zip(*(value.chunk(count) for value in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    """All of `.grad` as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def distance(vector: torch.Tensor, right: torch.Tensor) -> float:
    """Length of the difference, relative to the right vector."""
    return ((vector - right).norm() / right.norm()).item()


def learning(
    step: Callable[..., float], ways: Mapping[str, tuple[int, int, float, float]], seeds: int = 3
) -> dict[str, list[list[float]]]:
    """Losses of 64 held-out blocks after 0, 48, 96 and 144 other blocks; a list a seed.

    step: one step of an optimizer, from model, optimizer and a list of micro-batches.
    ways: size of a micro-batch, how many of them make a step, the rate and beta2 of AdamW.
    """
    return {w: [_learn(step, *how, seed) for seed in range(seeds)] for w, how in ways.items()}


def _learn(step, size: int, count: int, rate: float, beta2: float, seed: int) -> list[float]:
    model, (unseen, seen) = reader(seed=seed), blocks().split([64, len(blocks()) - 64])
    adamw = torch.optim.AdamW(model.parameters(), rate, (0.9, beta2), fused=True)
    torch.manual_seed(seed)
    order = seen[torch.randperm(len(seen))][:144]

    @torch.no_grad()
    def held_out() -> float:
        return model(input_ids=unseen, labels=unseen).loss.item()

    losses = [held_out()]
    for chunk in order.split(48):
        for read in chunk.split(size * count):
            step(model, adamw, split({"input_ids": read, "labels": read}, count))
        losses.append(held_out())
    return losses


def peak_of(backward: Callable[[torch.nn.Module, list[Batch]], object]) -> int:
    """Bytes at the peak, simulated, of `backward` on a GPT-2 of three layers.

    backward: from the model and a list of four micro-batches, each of one sequence of 512 tokens.
    """
    with SimulatedGPU() as gpu:
        config = small_config("gpt2", 0.1, num_hidden_layers=3)
        gpt2 = models.build(config, attention="sdpa").to("cuda")
        tokens = torch.randint(50257, (4, 512), device="cuda")
        backward(gpt2, split({"input_ids": tokens, "labels": tokens}, 4))
    return gpu.footprint.peak_allocated


def counted(epoch: Callable[..., object], count: int) -> tuple[list[int], int]:
    """(forward passes before each step of the optimizer, passes after the last one) of an epoch.

    epoch: a loop, from model, optimizer and a list of `count` micro-batches.
    """
    model, events = reader(), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    model.register_forward_pre_hook(lambda *_: events.append("pass"))
    sgd.register_step_post_hook(lambda *_: events.append("step"))
    ids = blocks()[:count]
    epoch(model, sgd, split({"input_ids": ids, "labels": ids}, count))
    *steps, left = (part.count("pass") for part in " ".join(events).split("step"))
    return steps, left


# ---------------------------------------------------------------- the Trainer


def classifier() -> torch.nn.Module:
    """A small BERT that classifies, always with the same weights."""
    return models.build(small_config("bert-large-tiny"))


def reviews() -> Batch:
    """24 rows of 32 random ids for `classifier`, of two classes."""
    ids = torch.randint(4096, (24, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": torch.arange(24) % 2}


def trained(model: torch.nn.Module, batch: Batch, size: int, count: int) -> list[float]:
    """Losses of three steps of a Trainer, each of `count` micro-batches of `size` rows."""
    from transformers import Trainer

    columns = (value.tolist() for value in batch.values())
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
    recipe = Recipe("bert-large", None, size, 128, count, optimizer="adamw_torch")
    steps: dict[str, Any] = dict(max_steps=3, logging_steps=1, learning_rate=1e-3, **QUIET)
    with tempfile.TemporaryDirectory() as folder:
        arguments = recipe.training_arguments(folder, **steps)
        losses = trainer_losses(Trainer(model, arguments, train_dataset=rows))
    return [round(loss, 4) for loss in losses]
