"""Draw the picture of the README and the landing page, _static/cover.svg, from simulations.

Run it with `make cover` after a change of the simulator. The picture carries its figures in its
description, and tests/test_kept.py compares them with fresh simulations.
"""

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np

from memlab import Recipe, find_gpu, simulate
from memlab.book import show

COVER = Path(__file__).resolve().parents[1] / "_static" / "cover.svg"
MiB, GiB = 2**20, 2**30
CARD = "T4"
PLAIN = Recipe(model="bert-large", batch_size=16, seq_len=512, attention="sdpa")
RECIPES = {
    "plain": PLAIN,
    "LoRA": PLAIN.but(lora_rank=8),
    "fp16 autocast": PLAIN.but(precision="fp16-amp"),
    "accumulation, 4 x 4": PLAIN.but(batch_size=4, accumulation=4),
    "checkpointing": PLAIN.but(checkpointing=True),
}
SHOWN = ("parameters", "gradients", "optimizer_states", "activations", "temporary")


def draw(footprints: dict):
    """One bar per recipe, with its name and peak above it, so that it is legible on a phone."""
    fig, ax = show.figure(5, 4.2)
    mpl.rcParams["font.size"] = 12
    left = np.zeros(len(footprints))
    for kind in SHOWN:
        values = np.array([f.breakdown[kind] for f in footprints.values()]) / GiB
        label = kind.replace("_", " ")
        ax.barh(range(len(left)), values, 0.42, left, color=show.COLOURS[kind], label=label)
        left += values
    usable = find_gpu(CARD).usable / GiB
    for row, (label, footprint) in enumerate(footprints.items()):
        peak = footprint.peak_allocated / GiB
        word = "" if peak < usable else ": too much"
        ax.text(0.1, row - 0.3, f"{label}, {peak:.1f} GiB{word}", va="bottom", fontsize=12)
    ax.axvline(usable, color=show.GREY, linestyle="--")
    ax.text(usable, -0.85, f"{CARD} ", ha="right", va="bottom", fontsize=12)
    ax.set(yticks=[], ylim=(len(left) - 0.6, -0.9), xlim=(0, left.max() * 1.02))
    ax.tick_params(labelsize=11)
    ax.grid(visible=False)
    fig.legend(loc="outside lower center", ncols=2, fontsize=12)
    return fig


def main() -> None:
    footprints = {label: simulate(recipe) for label, recipe in RECIPES.items()}
    mpl.rcParams["svg.hashsalt"] = "cover"  # fixed ids: equal figures give an equal file
    fig = draw(footprints)
    peaks = {label: round(f.peak_allocated / MiB) for label, f in footprints.items()}
    metadata = {"Description": json.dumps(peaks), "Date": None}
    fig.savefig(COVER, metadata=metadata, bbox_inches="tight")
    print(COVER.name, peaks)


if __name__ == "__main__":
    main()
