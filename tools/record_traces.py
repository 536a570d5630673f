"""Record the traces that come with memlab.

    python tools/record_traces.py            record missing traces; all, if `FORMAT` has changed
    python tools/record_traces.py --check 40 record 40 at random and compare them with the stored
                                             ones

`FORMAT` is in memlab/predict/store.py. It must be increased if a rule of memlab changes which
events a run has. The check tells: if a trace differs, it lists the differences and exits with
status 1. Otherwise it marks the stored traces as valid for the installed releases.

The tool covers what the pages' calculator and the planner ask for, on GPUs with flash attention
and without, and the runs of `memlab record`. It takes about an hour on two processes. Finished
traces are written after each batch of recordings, so an interrupted run loses little.
"""

import argparse
import dataclasses
import itertools
import json
import lzma
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

from tqdm import tqdm

from memlab import Recipe, models
from memlab.evidence.grid import grid_runs
from memlab.gpus import ANY_CARD, find_gpu
from memlab.libraries import installed, write_whole
from memlab.panels.moments import largest_moments
from memlab.planner.space import NF4
from memlab.predict.shipped import FOLDER, NO_TRACE, Shipped, file_of, split_key
from memlab.predict.store import FORMAT, RecordedPhase, kept_of, text_of
from memlab.predict.structure import has_fused_products, has_no_trace, structures
from memlab.predict.trace_recorder import record
from memlab.predict.traces import keys_of, usual_sizes
from memlab.spec.recipe import AUTOCAST

# One model for each of the structures that are trained most (COMMON), and for structures that are
# trained in fewer ways (FEWER).
COMMON = ("bert-large", "gpt2", "llama-3.2-1b", "llama-3-8b", "llama-2-7b")
COMMON += ("qwen2.5-0.5b", "qwen2.5-7b", "mistral-7b", "qwen3-0.6b", "qwen3-8b")
FEWER = ("distilbert", "roberta-base", "deberta-v3-base", "t5-3b")
# These only as the planner trains: fused attention, under autocast, or fully in bf16 or fp32.
PLANNED_ONLY = ("mistral-7b-v0.3", "smollm3-3b", "xlm-roberta-base", "modernbert-base", "phi-4")
PLANNED_ONLY += ("gemma-3-4b",)
# Models that would take minutes to plan for, because their layers take long to record. The layers
# repeat in a pattern or not at all, belong to an encoder and a decoder, or have attention of their
# own. These traces are for the length that people plan with, or the model's longest.
SLOW = ("gemma-3-270m", "gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b")
SLOW += ("modernbert-base", "modernbert-large", "deberta-v3-base", "flan-t5-base", "t5-3b")
SLOW += ("gemma-2-2b", "olmo-3-7b")
PLANNED_LENGTH = 2048  # tokens
TOO_LARGE = ("gemma-3-12b", "gemma-3-27b", "olmo-3-7b")  # for a T4
# Their widths belong to the structure, so they need a trace for each class of GPUs.
OWN_WIDTHS = ("gemma-3-270m", "gemma-3-1b")
MODELS = tuple(dict.fromkeys((*COMMON, *PLANNED_ONLY, *FEWER, *SLOW)))
ONLY_EAGER = ("deberta-v3-base", "gemma-2-2b")
WAYS = {
    "plain": {},
    "lora": {"lora_rank": 8},
    "lora in 16 bits": {"lora_rank": 8, "base": "half"},
    "qlora": {"lora_rank": 8} | NF4,
    "frozen embeddings": {"freeze": "embeddings"},
}
# Optimizers of plans, recorded with and without gradient clipping.
PLANNED = ("adamw_torch_fused", "adamw_8bit", "adafactor", "paged_adamw_8bit")
OTHERS = ("adamw_torch", "sgd", "lion_8bit")
CARDS = ANY_CARD, find_gpu("T4")
SEED = "1"  # for PYTHONHASHSEED
DEEPER = 5  # patterns of layers; more than any recording has


def recipes(model: str):
    """(recipe, GPU) pairs that together have all wanted halves of a model's structure.

    A trace holds for all sizes, so sizes do not matter. Only whether a sequence is as long as the
    attention window does.
    """
    if model in PLANNED_ONLY:
        yield from _planned(model, 64)
    if model in SLOW:
        longest = models.max_length(model) or PLANNED_LENGTH
        yield from _planned(model, min(longest, PLANNED_LENGTH), slow=True)
    if model not in (*COMMON, *FEWER):
        return
    common, only_eager = model in COMMON, model in ONLY_EAGER
    ways = WAYS if common else {"plain": {}}
    for card, (way, start) in itertools.product(CARDS, ways.items()):
        precisions = ["fp16-amp"] + ["bf16-amp", "bf16"] * (card == ANY_CARD)
        precisions += ["fp32"] * (way == "plain")
        if start.get("base") == "half":
            precisions = [one for one in precisions if one in AUTOCAST]
        for precision in precisions:
            attentions = ["eager"]
            if not only_eager:
                # LoRA with eager attention is recorded on the T4 only, that is, in fp16-amp.
                few = way != "frozen embeddings" and precision != "fp32"
                attentions = ["sdpa"] + ["eager"] * (way == "plain" or few and card != ANY_CARD)
            for attention in attentions:
                yield from _pairs(model, card, start | {"precision": precision}, attention, common)


def _planned(model, length, slow=False):
    """Pairs as the planner trains. slow: only plans' defaults, on GPUs that may hold the model."""
    cards = CARDS[:1] if model in TOO_LARGE else CARDS
    if model in OWN_WIDTHS:
        cards += (find_gpu("RTX-4090"),)
    half = dict.fromkeys(cards, ("bf16-amp", "fp32", "bf16"))
    half |= {CARDS[1]: ("fp16-amp", "fp32")}
    attention = "eager" if model in ONLY_EAGER else "sdpa"
    for card, way in itertools.product(cards, ("plain", "lora in 16 bits", "qlora")):
        for precision in half[card][: (3 - slow) if way == "plain" else 1]:
            values = WAYS[way] | {"precision": precision}
            yield from _pairs(model, card, values, attention, True, length, slow)


def _pairs(model, card, values, attention, common, asked=64, slow=False):
    """Pairs that cover all variants of passes and updates.

    Each run records one variant of both, so the two lists are walked side by side.
    """
    planned = slow or common and attention == "sdpa" and "freeze" not in values
    batches, accumulations = (2, 1) if planned else (2,), (1, 2) if common else (1,)
    passes = list(itertools.product(batches, (False, True), accumulations))
    clipped = [(name, 1.0) for name in (*PLANNED, *OTHERS[1:])] if planned else []
    updates = [(name, 0.0) for name in (*PLANNED, *OTHERS)] + clipped
    if values.get("lora_rank"):
        updates = [one for one in updates if one[0] not in OTHERS[1:]]
    # An update does not depend on attention: the runs with sdpa record all of them.
    if attention == "eager" and model not in ONLY_EAGER:
        updates = updates[:1]
    if slow:
        updates = [(name, 1.0) for name in PLANNED[: 1 if values.get("lora_rank") else None]]
    for i in range(max(len(passes), len(updates))):
        batch, checkpointing, accumulation = passes[i if i < len(passes) else 0]
        optimizer, norm = updates[i % len(updates)]
        changes = {"checkpointing": checkpointing, "accumulation": accumulation}
        changes |= {"optimizer": optimizer, "max_grad_norm": norm, "attention": attention}
        usual = usual_sizes(Recipe(model, seq_len=asked, **values, **changes))
        # As many tokens with one sequence as with two, and more if need be: with few tokens
        # bitsandbytes runs a fused kernel, which would be another trace.
        length = usual.seq_len * usual.batch_size // batch
        longest = models.max_length(model) or PLANNED_LENGTH
        recipe = usual.but(batch_size=batch, seq_len=min(length, longest))
        while has_fused_products(recipe, card) and 2 * recipe.seq_len <= longest:
            recipe = recipe.but(seq_len=2 * recipe.seq_len)
        yield recipe, card


def wanted(asked) -> list[tuple]:
    """(recipe, GPU, structure) of the asked pairs, without those that add no new half."""
    cases, known = [], set()
    for recipe, card in asked:
        if has_no_trace(recipe, card):
            continue
        case = recipe, card, next(structures(recipe, card, ignore_small_tensors=True))[0]
        if not known.issuperset(keys(case)):
            cases.append(case)
            known.update(keys(case))
    return cases


def keys(case: tuple) -> tuple[str, str]:
    """The keys of both halves of a case."""
    recipe, _, structure = case
    return keys_of(recipe, structure, structure)


def recorded(cases: list[tuple]) -> dict[str, str]:
    """Key -> half as a line of JSON, newly recorded for all cases."""
    found = {}
    for case in cases:
        halves = [kept and with_moments(kept) for kept in record(*case) or (None, None)]
        found = joined(found, dict(zip(keys(case), map(text_of, halves), strict=True)))
    return found


def with_moments(kept: RecordedPhase) -> RecordedPhase:
    """A half with the moments that the page's calculator needs."""
    return dataclasses.replace(kept, largest=largest_moments(kept.half))


def joined(kept: dict[str, str], new: dict[str, str]) -> dict[str, str]:
    """Stored and new lines together; a stored trace wins, but any trace beats "no trace".

    The same key may come from several cases. If one of them gives no trace, the half that another
    case has given stays.
    """
    return new | kept | {key: line for key, line in new.items() if line != NO_TRACE}


def write(lines: dict[str, str]) -> None:
    """Add lines to the files of their structures. lines: key -> line."""
    shipped, by_structure = Shipped(), {}
    for key, line in lines.items():
        structure, rest = split_key(key)
        by_structure.setdefault(structure, {})[rest] = line
    for structure, found in by_structure.items():
        kept = joined(shipped.lines(structure), found)
        text = "\n".join(itertools.chain.from_iterable(sorted(kept.items())))
        write_whole(FOLDER / file_of(structure), lzma.compress(text.encode(), preset=6))


def stamp() -> None:
    """Note the format and the installed releases as those of the stored traces."""
    index = {"format": FORMAT, "versions": installed()}
    (FOLDER / "index.json").write_text(json.dumps(index, indent=1) + "\n")


def _values(line: str) -> dict:
    """The values of a line, normalised so that equivalent traces are equal.

    - An update may be recorded next to different passes: batch, length and window are left out.
    - Of two moments that are equally large, the processor's rounding chooses: all are left out.
    - A repeating block may begin at any of its events: its order in a deeper model is compared.
    """
    values, kept = json.loads(line) or {}, kept_of(line)
    sizes = {name: n for name, n in values.get("sizes", {}).items() if name not in "bsw"}
    alike = {"batches": None, "sizes": sizes, "largest": None}
    if kept and kept.half.log.blocks:
        alike |= {"blocks": kept.half.log.order_at(DEEPER).tolist(), "order": None}
    return values | alike


def check(number: int, seed: int | None = None) -> None:
    """Record `number` random cases and compare them with the stored traces.

    Exits with status 1 and a list of the differences if there are any. seed: to draw the same cases
    every time, which says nothing of the others, so that no stored trace is marked as valid.
    """
    kept = Shipped()
    cases = wanted(itertools.chain.from_iterable(map(recipes, MODELS)))
    differing = []
    for case in random.Random(seed).sample(cases, number):
        for key, line in recorded([case]).items():
            # A key that is not stored is compared with itself: it is missing, not wrong.
            structure, rest = split_key(key)
            was, now = _values(kept.lines(structure).get(rest, line)), _values(line)
            if was != now:
                differing.append(f"{[name for name in now if was.get(name) != now[name]]} of {key}")
    if differing:
        sys.exit("\n".join(["other events than those kept: raise FORMAT, record anew", *differing]))
    if seed is None:
        stamp()


def with_fixed_hashes() -> None:
    """Restart the process with a fixed PYTHONHASHSEED.

    transformers iterates over a set to make rotary tables, and its order depends on the hashes.
    """
    if os.environ.get("PYTHONHASHSEED") != SEED:
        there = os.environ | {"PYTHONHASHSEED": SEED}
        os.execve(sys.executable, [sys.executable, *sys.argv], there)


def main():
    with_fixed_hashes()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", type=int, default=0, help="so many, at random")
    parser.add_argument("--seed", type=int, help="draw the same cases every time, mark nothing")
    args = parser.parse_args()
    if args.check:
        check(args.check, args.seed)
        return
    if not Shipped().is_of_this_format:
        for file in FOLDER.glob("*"):  # traces of another format cannot be read
            file.unlink()
        FOLDER.mkdir(exist_ok=True)
        stamp()
    grid = [
        (usual_sizes(run), card)
        for run in grid_runs().values()
        for card in CARDS
        if "bf16" not in run.precision or "bfloat16" in card.native_dtypes
        if set(run.freeze) <= {"embeddings", "backbone"}
    ]
    # A new `Shipped`, because the files may just have been deleted.
    shipped = Shipped()
    with ProcessPoolExecutor(2) as pool:
        jobs = []
        for asked in (*map(recipes, MODELS), grid):
            new = [case for case in wanted(asked) if not all(key in shipped for key in keys(case))]
            jobs += [pool.submit(recorded, new[i : i + 12]) for i in range(0, len(new), 12)]
        for job in tqdm(as_completed(jobs), total=len(jobs)):
            write(job.result())


if __name__ == "__main__":
    main()
