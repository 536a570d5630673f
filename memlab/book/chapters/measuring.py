"""Measuring: contexts that were seen, attempts on a full card, two experiments in one process."""

import gc
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from memlab import gpus, models
from memlab.book import show
from memlab.card.device import SimulatedGPU
from memlab.footprint import Footprint
from memlab.predict.measure import Meter, alive_tensors, device_name
from memlab.spec.recipe import Recipe
from memlab.units import GiB, MiB

MESSAGE = {  # the figures of an out-of-memory message, in their order
    "tried": "the request",
    "capacity": "the card, less the driver's part",
    "free": "not taken by anybody",
    "process": "reserved + context",
    "allocated": "tensors, in blocks",
    "unallocated": "cache: free, but in pieces",
}


def lengths_figure(run: Footprint, card: gpus.GPU) -> Figure:
    """Allocated, reserved and device used at the peak, in GiB, beside all of a card."""
    used = run.peak_reserved + (run.context or 0)
    bars = [
        ("allocated:\ntensors", run.peak_allocated, 0),
        ("reserved:\nsegments", run.peak_reserved, 0),
        ("device used:\nnvidia-smi", run.peak_reserved, run.context or 0),
    ]
    fig, ax = show.figure(5, 2.6)
    for label, inside, context in bars:
        inside, context = inside / GiB, context / GiB
        ax.barh(label, inside, color=show.COLOURS["parameters"])
        ax.barh(label, context, left=inside, color=show.COLOURS["gradients"])
        ax.text(inside + context, label, f" {inside + context:.2f}", va="center")
    total = (card.total_memory or 0) / GiB
    if total:
        ax.axvline(total, color=show.GREY, ls="--")
        ax.text(total, 1, f"{card.name} ", va="center", ha="right")
    ax.set(xlabel="GiB, simulated", xlim=(0, max(1.06 * total, 1.2 * used / GiB)))
    ax.grid(visible=False)
    ax.invert_yaxis()
    return fig


def contexts(device: torch.device) -> dict[str, int]:
    """Bytes of a process's CUDA context by card: those that somebody saw, and the one here."""
    seen = (card for card in gpus.GPUS.values() if "context: assumed" not in card.sources)
    found = {card.name: card.context for card in seen}
    if device.type == "cuda":
        with Meter() as meter:
            torch.ones(1, device=device)
        found[f"measured here: {device_name(device)}"] = meter.footprint.context
    return found


def softmax_inputs(recipe: Recipe) -> int:
    """Bytes of a tensor of fp32 attention scores in each layer."""
    config = models.config(recipe.model)
    scores = 4 * recipe.batch_size * config.num_attention_heads * recipe.seq_len**2
    return config.num_hidden_layers * scores


def wider_masks(recipe: Recipe) -> int:
    """Bytes that a CPU's dropout masks at the peak of an eager BERT have more than CUDA's.

    Three more for each value of the attention weights, of two outputs a layer and of the
    embeddings; one of these masks is gone at the peak.
    """
    config = models.config(recipe.model)
    batch, length, layers = recipe.batch_size, recipe.seq_len, config.num_hidden_layers
    weights = layers * batch * config.num_attention_heads * length**2
    outputs = 2 * layers * batch * length * config.hidden_size
    return 3 * (weights + outputs)


def attempts_figure(story: Footprint, log: Sequence[tuple[int, str]], limit: int | None) -> Figure:
    """Memory over attempts at a step, by kind, in GiB.

    log: (sequences, outcome) of each attempt. limit: bytes of the card, None without one.
    """
    kinds = "parameters optimizer_states activations gradients temporary".split()
    levels = {kind: np.array(story.timeline.levels[kind]) / GiB for kind in kinds}
    totals = np.array(story.timeline.totals()) / GiB
    fig, ax = show.figure(5, 3.6)
    hues = [show.COLOURS[kind] for kind in kinds]
    names = [kind.replace("_", " ") for kind in kinds]
    ax.stackplot(range(len(totals)), *levels.values(), labels=names, colors=hues)
    top = (limit or 0) / GiB or totals.max()
    borders = [0, *_ends_of_attempts(sum(levels[kind] for kind in kinds[2:]))]
    for (tried, outcome), a, b in zip(log, borders, borders[1:], strict=False):
        ax.axvline(b, color=show.GREY, linewidth=0.6)
        word = "full" if outcome == "out of memory" else outcome
        ax.text((a + b) / 2, top + 0.3, f"{tried}:\n{word}", ha="center")
    ax.axhline(top, color=show.GREY, ls="--")
    ax.set(xlim=(0, len(totals)), ylim=(0, top * 1.2), xticks=[])
    ax.set(ylabel="GiB (dashed: all of the card)")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def _ends_of_attempts(passing: np.ndarray) -> list[int]:
    """The moments at which all that comes and goes in a step is gone again."""
    there = np.flatnonzero(passing > 0.02 * passing.max())
    stretches = np.split(there, 1 + np.flatnonzero(np.diff(there) > 1))
    large = 0.1 * passing.max()  # others pass by between two attempts
    return [part[-1] + 1 for part in stretches if len(part) and passing[part].max() > large]


def six_figures(message: str) -> pd.DataFrame:
    """What the figures of an out-of-memory message mean, a row each; no rows without one."""
    sizes = re.findall(r"[\d.]+ (?:[KMG]iB|bytes)", message)
    rows = {w: (m, s) for (w, m), s in zip(MESSAGE.items(), sizes, strict=bool(message))}
    return pd.DataFrame(rows, index=["meaning", "figure"]).T


def experiment(device: torch.device | str) -> None:
    """Two steps of a tiny GPT-2, all of whose names go when it returns."""
    model = models.build("gpt2-tiny").to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(4096, (4, 64), device=device)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def two_experiments() -> tuple[pd.DataFrame, float]:
    """(peak and what stays of two experiments in one process, cuBLAS's workspaces), in MiB."""
    rows = {}
    with SimulatedGPU("T4") as card:
        for name in ("first", "second"):
            torch.cuda.reset_peak_memory_stats()
            experiment("cuda")
            peak = torch.cuda.max_memory_allocated()
            gc.collect()
            torch.cuda.empty_cache()
            rows[name] = {"peak": peak, "allocated after": torch.cuda.memory_allocated()}
    return pd.DataFrame(rows).T / MiB, card.footprint.breakdown["workspaces"] / MiB


def live_experiments(device: torch.device) -> list[tuple[int, int]]:
    """(peak, bytes alive afterwards) of two experiments on a device."""
    found = []
    for _ in range(2):
        with Meter(device) as meter:
            experiment(device)
        gc.collect()
        left = sum(size for size, _ in alive_tensors(device, most=10**6))
        found.append((meter.footprint.peak_allocated, left))
    return found


def quartiles(times: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Median, ratio to the first row, and quartiles of each; the first two are not counted."""
    frame = pd.DataFrame(times)
    low, median, high = (frame.iloc[2:].quantile(part) for part in (0.25, 0.5, 0.75))
    ratios = (median / median.iloc[0]).map("{:.2f}".format)
    spans = [f"{a:.1f} to {b:.1f}" for a, b in zip(low, high, strict=True)]
    columns = {"median": median, "/ A": ratios, "quartiles": spans, "first": frame.iloc[0]}
    return pd.DataFrame(columns)
