"""The cheat sheet: what its rows change and say, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from IPython.display import HTML

from memlab.book import show
from memlab.predict.fit import Fit, fits
from memlab.predict.progress import Progress
from memlab.spec.recipe import Recipe

Change = dict[str, Any]
_BF16: Change = dict(precision="bf16-amp")
_STATES: Change = dict(optimizer="adamw_8bit")
_AGAIN: Change = dict(checkpointing=True)
_LORA: Change = dict(lora_rank=16, precision="bf16")
_NF4: Change = dict(base="nf4", double_quant=True, upcast=False)
# row -> what it changes of the encoder and of the decoder
CHANGES: dict[str, Sequence[Change]] = {
    "plain": ({}, {}),
    "accumulation": [dict(batch_size=n, accumulation=4) for n in (4, 1)],
    "freezing": [dict(freeze=f"embeddings,{n}") for n in (12, 8)],
    "precision": (_BF16, _BF16),
    "8-bit": (_STATES, _STATES),
    "checkpointing": (_AGAIN, _AGAIN),
    "lora": (_LORA, _LORA),
    "qlora": (_LORA | _NF4,) * 2,
    "eager": (dict(attention="eager"),) * 2,
    "three": (_BF16 | _STATES | _AGAIN,) * 2,
}
# In the order of the rows: name (chapter) | code | what it costs | leave it when
WORDS = """
Plain (3) | Trainer's defaults, dtype=torch.float32
| weights, gradients, two moments and all activations |

Accumulation (4) | gradient_accumulation_steps=4
| smaller products, more launches
| one sequence does not fit; the loss compares sequences of a batch

Freeze the lower half (5) | p.requires_grad_(False)
| what is frozen does not adapt
| something below still trains: backward then goes all the way

Mixed precision (6) | bf16=True
| a 16-bit copy of each weight in use; fp16 needs loss scaling
| accumulating over single sequences: the copies outweigh the gain

8-bit AdamW (7) | optim="adamw_8bit"
| decoding and coding in each step; lowers the peak, not the activations
| little is trained, as with LoRA

Checkpointing (8) | activation_checkpointing=True
| the forward pass a second time
| the peak is the optimizer's step or the logits

LoRA, bf16 weights (13)
| dtype=torch.bfloat16, LoraConfig(r=16, target_modules="all-linear")
| a longer graph; may learn less
| activations or logits are nearly all of the peak

QLoRA, the rest as in LoRA (13)
| BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
| weights are rounded, and written out for each product
| LoRA fits without checkpointing; the result must stay in 4 bits

No fused attention (14) | attn_implementation="eager"
| the matrix of all pairs of tokens, which plain Llama stores, too
| always, but for attention's weights, or where no kernel is fused

Mixed precision, 8-bit AdamW, checkpointing (6 to 8)
| bf16=True, optim="adamw_8bit", activation_checkpointing=True
| the costs of each | one of them is enough
"""


def row_runs(encoder: Recipe, decoder: Recipe, card: str) -> dict[str, list[Fit]]:
    """Row -> what `fits` says of both models with its change."""
    bar = Progress(CHANGES.items())
    return {
        name: [
            fits(r.but(**change), card) for r, change in zip((encoder, decoder), pair, strict=True)
        ]
        for name, pair in bar
    }


def cell(run: Fit, plain: Fit, lora: Fit | None = None) -> str:
    """What a cell says: GiB and whether they fit; beside plain's the share and the time.

    lora: what QLoRA is compared with besides.
    """
    time, usual = run.footprint.step_seconds, plain.footprint.step_seconds
    peak = f"<b>{run.needed / 2**30:.1f} GiB {'✓' if run else '✗'}</b>"
    if run is plain:
        return f"{peak}<br>{show.between(time.low, time.high)} s a step"
    less = f"{run.needed / plain.needed - 1:+.0%}"
    if lora is not None:
        less += f"<br>of LoRA {run.needed / lora.needed - 1:+.0%}"
    return f"{peak}<br>{less}<br>time × {show.ratio_between(time.expected / usual.expected)}"


def sheet(runs: dict[str, list[Fit]]) -> HTML:
    """The table, a row each of `WORDS`."""
    lines = []
    for text, (row, pair) in zip(WORDS.split("\n\n"), runs.items(), strict=True):
        name, how, cost, leave = (" ".join(part.split()) for part in text.split("|"))
        beside = runs["lora"] if row == "qlora" else (None, None)
        cells = map(cell, pair, runs["plain"], beside)
        lines.append([f"<b>{name}</b><br><code>{how}</code>", *cells, cost, leave])
    columns = ["technique (chapter)", "BERT-large", "Llama 3.2 1B", "costs", "leave it when"]
    frame = pd.DataFrame(lines, columns=columns)
    return HTML(frame.to_html(classes="cheat-sheet", index=False, escape=False, border=0))
