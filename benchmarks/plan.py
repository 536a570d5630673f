"""Does what `memlab.plan` says fits do so in `memlab.simulate`? Random questions, with a seed.

    python benchmarks/plan.py [answers.jsonl] [questions] [first seed]

Every option that a plan says fits is simulated on the card. Of the fastest
recipe and of the one with the most room, the largest micro-batch must fit by `memlab.fits`, which
is a simulation of its own, and the next one must not; so must the longest sequence of the fastest.
Each answer is a line of the file, with what is wrong in it; those that are there are not asked
again. Prints them, and at the end how many are wrong. Questions share their traces, which depend on
no size: most of the time is that of the simulations they are checked by.
"""

import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from memlab import fits, models, plan, simulate
from memlab.gpus import GPUS
from memlab.planner.result import WAYS

MODELS = ("bert-base", "bert-large", "gpt2", "gpt2-xl", "llama-3.2-1b", "llama-3-8b")


def question(seed: int) -> dict:
    """The arguments of a plan."""
    draw = random.Random(seed)
    model = draw.choice(MODELS)
    lengths = [n for n in (64, 128, 200, 384, 512, 1000, 2048) if n <= models.max_length(model)]
    return {
        "model": model,
        "gpu": draw.choice(list(GPUS)),
        "seq_len": draw.choice(lengths),
        "effective_batch": draw.choice((1, 4, 8, 12, 16, 32, 64)),
        "ways": draw.choice((tuple(WAYS), ("full",), ("lora", "qlora"), ("full", "lora"))),
        "keep_quality": draw.random() < 0.8,
    }


def runs(option, gpu) -> bool:
    """Whether an option is simulated without running out of memory."""
    try:
        simulate(option.recipe, gpu)
    except torch.OutOfMemoryError:
        return False
    return True


def wrong(answer, gpu) -> list[str]:
    """What a plan says that is not so."""
    found = []
    told = {"fastest": answer.fastest, "roomiest": answer.roomiest} | answer.tiers
    asked = set()
    for name, option in told.items():
        if option is None or option.missing or str(option.recipe) in asked:
            continue
        asked.add(str(option.recipe))
        if not runs(option, gpu):
            found.append(f"{name} runs out of memory: {option}")
    for option, field, value, step in borders(answer):
        at, beyond = (replace(option.recipe, **{field: n}) for n in (value, value + step))
        if not fits(at, gpu):
            found.append(f"{field}={value} does not fit: {option}")
        if fits(beyond, gpu):
            found.append(f"{field}={value + step} fits, too: {option}")
    return found


def borders(answer):
    """(option, field, largest value, step) of what a plan says of sizes."""
    both = [option for option in (answer.fastest, answer.roomiest) if option]
    for option in {str(option.recipe): option for option in both}.values():
        yield option, "batch_size", option.largest_batch, 1
    if answer and not answer.fastest.longest_ends:
        yield answer.fastest, "seq_len", answer.fastest.longest, 64


def answered(seed: int) -> dict:
    """What became of a question, as plain JSON values."""
    asked = question(seed)
    answer = plan(**asked)
    tiers = sum(not option.missing for option in answer.tiers.values())
    errors = wrong(answer, asked["gpu"])
    return {"seed": seed, "asked": asked, "fits": bool(answer), "tiers": tiers, "errors": errors}


def main():
    path = Path(sys.argv[1] if len(sys.argv) > 1 else f"{tempfile.gettempdir()}/plans.jsonl")
    given = [int(word) for word in sys.argv[2:]]
    number, first = given + [200, 0][len(given) :]
    known = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    answers = {one["seed"]: one for one in known}
    for seed in range(first, first + number):
        if seed not in answers:
            answers[seed] = answered(seed)
            with path.open("a") as file:
                file.write(json.dumps(answers[seed]) + "\n")
            print(json.dumps(answers[seed]), flush=True)
    answers = [answers[seed] for seed in range(first, first + number)]
    fitting, tiers = (sum(one[name] for one in answers) for name in ("fits", "tiers"))
    print(f"{number} questions, something fits in {fitting}; {tiers} tiers that fit")
    print(f"{sum(bool(one['errors']) for one in answers)} answers with something that is not so")


if __name__ == "__main__":
    main()
