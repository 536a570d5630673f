"""Derive the coefficients of memlab.formula anew, after an update of torch or transformers.

It goes through the runs of `memlab record` and some common recipes, which takes minutes; what is
done is kept after each. Delete the file first to derive what it holds again.
"""

import json
import sys

import peft
import torch
import transformers
from tqdm import tqdm

from memlab import Recipe
from memlab.closed_form import FILE, coefficients, key
from memlab.derivation import derive
from memlab.evidence.grid import grid_runs

# What readers ask for, beside the runs that are recorded.
COMMON = [
    Recipe(model=model, **numbers, **way)
    for model in ("bert-large", "distilbert", "gpt2", "llama-3.2-1b", "llama-3-8b", "qwen2.5-7b")
    for numbers in (
        {"precision": "fp32", "attention": "eager"},
        {"precision": "fp16-amp", "attention": "sdpa"},
        {"precision": "bf16", "attention": "sdpa"},
    )
    for way in ({}, {"checkpointing": True})
]


def main():
    for recipe in tqdm([*grid_runs().values(), *COMMON]):
        try:
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
    whole = f'{{"versions": {json.dumps(versions)},\n"cases": {{\n{text}\n}}}}\n'
    half_written = FILE.with_suffix(".new")
    half_written.write_text(whole, encoding="utf-8")
    half_written.replace(FILE)


if __name__ == "__main__":
    main()
