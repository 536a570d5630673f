"""How far is the closed form from the simulation, and how long does it take?

Prints the error of allocated and reserved over a grid: median, 95th percentile, worst; and the
recipes that the formula refuses.
"""

import itertools
import time

import numpy as np

from memlab import Recipe, formula, simulate

MODELS = ("bert-base", "bert-large", "gpt2", "gpt2-xl", "llama-3-8b", "qwen2.5-1.5b", "t5-3b")
SIZES = ((1, 512), (8, 128), (2, 1024))
WAYS = (
    {},
    {"precision": "fp16-amp", "attention": "sdpa"},
    {"precision": "bf16", "attention": "sdpa", "lora_rank": 16, "checkpointing": True},
    {"precision": "bf16-amp", "checkpointing": True},
    {"lora_rank": 8},
)


def main():
    errors, refused, seconds = [], [], []
    for model, (batch_size, seq_len), way in itertools.product(MODELS, SIZES, WAYS):
        try:
            recipe = Recipe(model=model, batch_size=batch_size, seq_len=seq_len, **way)
        except ValueError:
            continue  # longer than the model allows
        try:
            formula(recipe)
        except ValueError as error:
            refused.append(str(error))
            continue
        start = time.process_time()
        quick = formula(recipe)
        seconds.append(time.process_time() - start)
        whole = simulate(recipe)
        pair = ("peak_allocated", "peak_reserved")
        errors.append([getattr(quick, name) / getattr(whole, name) - 1 for name in pair])
        allocated, reserved = errors[-1]
        print(f"{allocated:+9.3%} {reserved:+9.3%}  {recipe}", flush=True)
    print(f"{len(errors)} recipes, {len(refused)} refused")
    print(f"a call: {np.median(seconds) * 1e3:.2f} ms")
    for name, values in zip(("allocated", "reserved"), np.array(errors).T, strict=True):
        median, tail = np.percentile(abs(values), (50, 95))
        print(
            f"{name}: median {median:.3%}, 95th percentile {tail:.3%}, "
            f"worst {values.min():+.3%} and {values.max():+.3%}"
        )
    print(*refused, sep="\n")


if __name__ == "__main__":
    main()
