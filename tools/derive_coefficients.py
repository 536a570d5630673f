"""Derive the coefficients of memlab.formula anew, after an update of torch or transformers.

It goes through the runs of `memlab record` and what readers ask for, on cards with flash attention
and without, on two processes, which takes about three quarters of an hour; what is done is kept
after each family. Delete the file first to derive what it holds again.
"""

import gzip
import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

from tqdm import tqdm

from memlab import Recipe
from memlab.evidence.grid import grid_runs
from memlab.gpus import ANY_CARD, find_gpu
from memlab.planner.space import NF4
from memlab.predict.closed_form import FILE, coefficients, installed, known, read
from memlab.predict.coefficients import adopt, derive

# A model for each structure that people train most, and those trained in fewer ways.
COMMON = ("bert-large", "gpt2", "llama-3.2-1b", "llama-3-8b", "llama-2-7b")
COMMON += ("qwen2.5-0.5b", "qwen2.5-7b", "mistral-7b")
FEWER = ("distilbert", "roberta-base", "deberta-v3-base", "t5-3b")
LORA = {"lora_rank": 8, "attention": "sdpa"}
QLORA = LORA | NF4
CAST = QLORA | {"upcast": True}
HALF = ("fp16-amp", "bf16-amp", "bf16")
STATES = ("adamw_torch", "adamw_torch_fused", "adafactor", "adamw_8bit", "paged_adamw_8bit")


def recipes(model: str):
    """The ways of training a model that are derived; sizes do not matter."""
    attentions = ("eager",) if model == "deberta-v3-base" else ("eager", "sdpa")
    plain = itertools.product(("fp32", *HALF), attentions)
    ways = [{"precision": precision, "attention": kind} for precision, kind in plain]
    ways += [
        {"precision": precision, "attention": attentions[-1], "optimizer": optimizer}
        for precision in ("fp32", *HALF)
        for optimizer in (*STATES, "sgd", "lion_8bit")
    ]
    if model in COMMON:
        ways += [
            start | {"precision": precision, "optimizer": optimizer}
            for start in (LORA, QLORA, CAST, {"freeze": "embeddings", "attention": "sdpa"})
            for precision in HALF
            for optimizer in STATES
        ]
        ways += [start | {"precision": "fp16-amp", "attention": "eager"} for start in (LORA, QLORA)]
    for way in ways:
        for more in ({}, {"checkpointing": True}):
            for accumulation in (1, 2) if model in COMMON else (1,):
                yield Recipe(model, seq_len=64, accumulation=accumulation, **way, **more)


def family(asked: list[Recipe]) -> dict:
    """The coefficients of some recipes; the others' reasons go to stderr."""
    for recipe, card in itertools.product(asked, (ANY_CARD, find_gpu("T4"))):
        if "bf16" in recipe.precision and card != ANY_CARD:
            continue
        try:
            if not known(read(recipe, card)):
                derive(recipe, card)
        except ValueError as error:
            print(error, file=sys.stderr)
    return coefficients()


def main():
    families = [list(recipes(model)) for model in (*COMMON, *FEWER)] + [list(grid_runs().values())]
    with ProcessPoolExecutor(2) as pool:
        jobs = [pool.submit(family, asked) for asked in families]
        for job in tqdm(as_completed(jobs), total=len(jobs)):
            adopt(job.result())
            write()


def write():
    known = coefficients()
    lines = [{"versions": installed(), "terms": known["terms"]}]
    for key, half in known["halves"].items():
        lines += [key, half]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    half_written = FILE.with_suffix(".new")
    half_written.write_bytes(gzip.compress(text.encode(), mtime=0))
    half_written.replace(FILE)


if __name__ == "__main__":
    main()
