"""How far is the formula of several ranks from the simulation?

Goes through seeded random recipes of three families, ranks 2 to 64, all four ways to share, on
cards with flash attention and without. Prints the error of peak allocated, of the estimated seconds
and of the bytes sent: median, 95th percentile, worst, for each way; and how often a rank runs on
the smallest card that the calculator says it fits. With `--write` the errors of peak allocated go
into the package, where `formula` reads them.
"""

import json
import random
import sys

import numpy as np
from formula import CARDS, computes, runs_where_it_fits

from memlab import Recipe, find_gpu, formula
from memlab.predict.formula import is_kept
from memlab.predict.formula_ranks import ERRORS
from memlab.predict.simulate import full_log, serve

MODELS = (
    {"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8, "n_positions": 1024,
     "vocab_size": 32000},
    {"model_type": "bert", "num_hidden_layers": 10, "hidden_size": 640, "num_attention_heads": 10,
     "intermediate_size": 2560, "vocab_size": 20000},
    {"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 1024, "num_attention_heads": 16,
     "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 16000,
     "max_position_embeddings": 2048, "tie_word_embeddings": True},
    "gpt2", "bert-base", "qwen2.5-0.5b", "llama-3.2-1b",
)  # fmt: skip
SHARDINGS = "ddp zero1 zero2 zero3".split()
ASKED = 64


def recipes(number: int = ASKED, seed: int = 0):
    """So many recipes that the formula knows, the ways to share in turn, and cards."""
    draw, found = random.Random(seed), 0
    while found < number:
        model = draw.choice(MODELS)
        way = {"lora_rank": 8} if draw.random() < 0.2 else {}
        recipe = Recipe(
            model,
            batch_size=draw.choice((1, 2, 4, 8)),
            seq_len=draw.choice((64, 128, 256, 512)),
            accumulation=draw.choice((1, 1, 2, 4)),
            precision=draw.choice("fp32 fp16-amp bf16-amp bf16-amp bf16 bf16".split()),
            optimizer=draw.choice("adamw_torch adamw_torch_fused adamw_torch_fused sgd".split()),
            checkpointing=draw.choice((False, False, True)),
            attention=draw.choice(("eager", "sdpa", "sdpa")),
            **way,
        )
        card = find_gpu(draw.choice(CARDS)).without_limit()
        if computes(card, recipe) and is_kept(recipe, card):
            ranks = draw.choice((2, 4, 8, 16, 32, 64))
            yield recipe.but(ranks=ranks, sharding=SHARDINGS[found % len(SHARDINGS)]), card
            found += 1


def main():
    errors, run = {}, []
    for recipe, card in recipes():
        quick, log = formula(recipe, card), full_log(recipe, card)
        whole = serve(recipe, log, card)
        run.append(runs_where_it_fits(recipe, log, quick, card))
        pairs = [(quick.peak_allocated, whole.peak_allocated)]
        pairs += [
            (getattr(quick.step_time, name), getattr(whole.step_time, name))
            for name in ("expected", "sent")
        ]
        errors.setdefault(recipe.sharding, []).append([a / b - 1 for a, b in pairs])
        print(f"{errors[recipe.sharding][-1][0]:+8.2%}  {card.name}  {recipe}", flush=True)
    told = {}
    for sharding, found in errors.items():
        table = abs(np.array(found))
        for what, values in zip(("allocated", "seconds", "sent"), table.T, strict=True):
            median, tail = np.percentile(values, (50, 95))
            print(f"{sharding} {what}: {median:.2%}, {tail:.2%}, worst {values.max():.2%}")
        median, worst = np.median(table[:, 0]), table[:, 0].max()
        told[sharding] = {"recipes": len(found), "median": median, "worst": worst}
    print(f"the smallest card that the calculator says it fits: {sum(run)} of {len(run)} run")
    if "--write" in sys.argv:
        ERRORS.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
