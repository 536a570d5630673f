"""Draws the picture of the README and the landing page from simulations: _static/cover.svg.

Run it after a change of the simulator: `make cover`. tests/test_cover.py compares the figures
that the picture carries in its description with fresh simulations.
"""

import json
from pathlib import Path

import matplotlib as mpl

from memlab import Recipe, simulate
from memlab.book import show

COVER = Path(__file__).resolve().parents[1] / "_static" / "cover.svg"
MiB = 2**20
CARD = "T4"
PLAIN = Recipe(model="bert-large", batch_size=8, seq_len=512)
RECIPES = {
    "batch 8": PLAIN,
    "batch 8, fp16 autocast": PLAIN.but(precision="fp16-amp"),
    "batch 8, fused attention": PLAIN.but(attention="sdpa"),
    "1 x 8, accumulation": PLAIN.but(batch_size=1, accumulation=8),
    "batch 8, checkpointing": PLAIN.but(checkpointing=True),
}


def main() -> None:
    footprints = {label: simulate(recipe) for label, recipe in RECIPES.items()}
    mpl.rcParams["svg.hashsalt"] = "cover"  # the same figures give the same file
    fig = show.bars(footprints, limit=CARD, title="BERT-large, effective batch 8 x 512")
    peaks = {label: round(f.peak_allocated / MiB) for label, f in footprints.items()}
    metadata = {"Description": json.dumps(peaks), "Date": None}
    fig.savefig(COVER, metadata=metadata, bbox_inches="tight")
    print(COVER.name, peaks)


if __name__ == "__main__":
    main()
