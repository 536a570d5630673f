"""How far is the formula from the simulation, and how long does it take?

Goes through seeded random recipes of every family whose traces came with memlab, on cards with
flash attention and without. Prints the error of peak allocated and of the estimated seconds:
median, 95th percentile, worst; how often the range of reserved holds, and by how much it is missed;
and how often a training runs on the smallest card that the calculator says it fits.
"""

import math
import random
import sys
import time
from dataclasses import replace

import numpy as np

from memlab import Recipe, find_gpu, formula, models
from memlab.predict.fit import CONTEXT_MARGIN, MARGIN
from memlab.predict.formula import is_kept
from memlab.predict.simulate import full_log, peak_reserved_of, serve

NAMES = (
    "bert-base bert-large distilbert roberta-base deberta-v3-base gpt2 gpt2-medium gpt2-xl "
    "llama-3.2-1b llama-3.2-3b llama-3-8b llama-3.1-8b llama-2-7b qwen2.5-0.5b qwen2.5-1.5b "
    "qwen2.5-7b mistral-7b t5-3b"
).split()
LORA = {"lora_rank": 8}
NF4 = LORA | {"base": "nf4", "double_quant": True}
WAYS = ({}, {}, LORA, NF4, {"freeze": "embeddings"})
PRECISIONS = "fp32 fp16-amp bf16-amp bf16".split()
OPTIMIZERS = (
    "adamw_torch adamw_torch_fused adafactor adamw_8bit paged_adamw_8bit sgd lion_8bit"
).split()
CARDS = ("A100-80GB", "T4", "V100")  # without a limit
ASKED = 360


def recipes(number: int, seed: int = 0):
    """So many recipes that the formula knows, of random sizes, and cards."""
    draw = random.Random(seed)
    while number:
        model, way = draw.choice(NAMES), dict(draw.choice(WAYS))
        if "lora_rank" in way:
            way["lora_rank"] = draw.choice((4, 16, 32, 64))
        longest = models.max_length(model) or 1024
        recipe = Recipe(
            model,
            batch_size=draw.choice((1, 1, 2, 3, 4, 8, 16)),
            seq_len=min(longest, draw.choice((64, 128, 200, 256, 512, 1000, 1024, 2048))),
            accumulation=draw.choice((1, 1, 2, 4, 8)),
            precision=draw.choice(PRECISIONS),
            optimizer=draw.choice(OPTIMIZERS),
            checkpointing=draw.choice((False, True)),
            attention=draw.choice(("eager", "sdpa", "sdpa")),
            **way,
        )
        card = find_gpu(draw.choice(CARDS)).without_limit()
        if computes(card, recipe) and is_kept(recipe, card):
            number -= 1
            yield recipe, card


def computes(card, recipe: Recipe) -> bool:
    """Whether a card has a recipe's number format."""
    return "bf16" not in recipe.precision or "bfloat16" in card.native_dtypes


def runs_where_it_fits(recipe: Recipe, log, quick, card) -> bool:
    """Whether the upper end of a range, with the margins of `fits`, is card enough in truth."""
    needed = quick.reserved_range[1] + card.context
    total = math.ceil(needed * (1 + MARGIN)) + CONTEXT_MARGIN
    return peak_reserved_of(recipe, log, replace(card, total_memory=total)) is not None


def main():
    errors, times, ranges, seconds, run = [], [], [], [], []
    for recipe, card in recipes(int(sys.argv[1]) if len(sys.argv) > 1 else ASKED):
        formula(recipe, card)
        start = time.process_time()
        quick = formula(recipe, card)
        seconds.append(time.process_time() - start)
        log = full_log(recipe, card)
        whole = serve(recipe, log, card)
        run.append(runs_where_it_fits(recipe, log, quick, card))
        errors.append(quick.peak_allocated / whole.peak_allocated - 1)
        times.append(quick.step_seconds.expected / whole.step_seconds.expected - 1)
        ranges.append([end / whole.peak_reserved - 1 for end in quick.reserved_range])
        print(f"{errors[-1]:+9.3%} {times[-1]:+8.2%} s  {card.name}  {recipe}", flush=True)
    print(f"{len(errors)} recipes; a call: {np.median(seconds) * 1e3:.2f} ms")
    for name, values in (("allocated", np.array(errors)), ("seconds", np.array(times))):
        median, tail = np.percentile(abs(values), (50, 95))
        print(
            f"{name}: median {median:.3%}, 95th percentile {tail:.3%}, "
            f"worst {values.min():+.3%} and {values.max():+.3%}"
        )
    low, high = np.array(ranges).T
    inside = (low <= 0) & (high >= 0)
    print(
        f"reserved: {inside.sum()} of {len(inside)} inside the range, whose upper end is "
        f"{np.median(high):+.2%} in the median, {high.min():+.2%} and {high.max():+.2%} at worst"
    )
    print(f"the smallest card that the calculator says it fits: {sum(run)} of {len(run)} run")


if __name__ == "__main__":
    main()
