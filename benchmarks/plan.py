"""Check plans: does every option that `memlab.plan` calls fitting fit in `memlab.simulate`?

    python benchmarks/plan.py [answers.jsonl] [questions] [first seed]

The questions are random, with a seed each. Every option of a plan is simulated on the GPU. For the
fastest recipe and the one with the most room, the largest micro-batch must fit by `memlab.fits`,
and the next larger one must not. The same holds for the longest sequence of the fastest recipe.

Each answer is one line of the file, with its errors. Seeds that are in the file are not asked
again. The program prints the answers, and at the end how many are wrong. Questions share their
traces, which hold for all sizes, so most of the time goes into the simulations of the check.
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
    """Random arguments for `memlab.plan`."""
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
    """Whether the simulation of an option does not run out of memory."""
    try:
        simulate(option.recipe, gpu)
    except torch.OutOfMemoryError:
        return False
    return True


def wrong(answer, gpu) -> list[str]:
    """The claims of a plan that the check refutes, one line each."""
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
    """(option, field, largest value, step) of each largest size that a plan names."""
    both = [option for option in (answer.fastest, answer.roomiest) if option]
    for option in {str(option.recipe): option for option in both}.values():
        yield option, "batch_size", option.largest_batch, 1
    if answer and not answer.fastest.longest_ends:
        yield answer.fastest, "seq_len", answer.fastest.longest, 64


def answered(seed: int) -> dict:
    """The result of one question as plain JSON values."""
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
