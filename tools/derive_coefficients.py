"""Derive the coefficients of memlab.formula anew, after an update of torch or transformers.

It goes through the models and the ways of training below, so it takes a while; what is done is kept
after each.
"""

import itertools
import json
import sys

import peft
import torch
import transformers
from tqdm import tqdm

from memlab import Recipe
from memlab.formula import FILE, coefficients, derive, key

MODELS = (
    *("bert-large", "gpt2-xl", "llama-3-8b", "qwen2.5-1.5b", "t5-3b", "deberta-v3-base"),
    *("distilbert", "roberta-base", "llama-3.2-1b", "llama-2-7b", "qwen2.5-7b", "mistral-7b"),
)
NUMBERS = (
    {"precision": "fp32", "attention": "eager"},
    {"precision": "fp16-amp", "attention": "sdpa"},
    {"precision": "bf16-amp", "attention": "eager"},
    {"precision": "bf16", "attention": "sdpa"},
)
WAYS = (
    {},
    {"lora_rank": 8, "checkpointing": True},
    {"checkpointing": True},
    {"lora_rank": 8},
    {"optimizer": "adamw_torch_fused", "checkpointing": True},
)


def main():
    for way, numbers, model in tqdm(list(itertools.product(WAYS, NUMBERS, MODELS))):
        try:
            recipe = Recipe(model=model, **numbers, **way)
            if key(recipe) not in coefficients():
                derive(recipe)
                write()
        except ValueError as error:
            print(error, file=sys.stderr)


def write():
    packages = (torch, transformers, peft)
    versions = {package.__name__: package.__version__ for package in packages}
    cases = coefficients()
    text = ",\n".join(f"{json.dumps(key)}: {json.dumps(case)}" for key, case in cases.items())
    FILE.write_text(
        f'{{"versions": {json.dumps(versions)},\n"cases": {{\n{text}\n}}}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
