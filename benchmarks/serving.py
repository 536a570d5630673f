"""Is what the form of inference says of a card so in `memlab.fits`? Random borders, with a seed.

    python benchmarks/serving.py [questions] [first seed]

A question is a model, a format, a card and lengths for which the formula
(`memlab.predict.formula_serving`) has a border: the largest batch, or the longest prompt, that
it says fits, and the first that it says does not.
Both are simulated. A "fits" that is not so is an error; a "does not fit" that would have fitted is
the price of care, and counted. Each answer is printed as a line, in 3 seconds or so. Half of the
cards are a T4 or a V100, which have no flash attention.
"""

import json
import random
import sys
from bisect import bisect

from memlab import fits
from memlab.gpus import GPUS
from memlab.panels.serving_calculator import NAMES
from memlab.predict.formula_serving import BYTES, judged, shape
from memlab.spec.serving import Serving

OLD = ("T4", "V100")
VERDICTS = ("fits", "may fit", "does not fit")


def border(seed: int) -> tuple[dict, str, str, int, int]:
    """(values of a serving, card, field, its largest that fits, its first that does not).

    Drawn until the field has both within what the model allows.
    """
    draw = random.Random(seed)
    while True:
        model, gpu = draw.choice(NAMES), draw.choice(OLD if seed % 2 else list(GPUS))
        asked = {
            "model": model,
            "weights": draw.choice(list(BYTES)),
            "batch_size": round(2 ** draw.uniform(0, 6)),
            "prompt": round(2 ** draw.uniform(4, 13)),
            "new_tokens": draw.choice((1, 2, 64, 500)),
            "all_logits": draw.random() < 0.2,
        }
        field = draw.choice(("batch_size", "prompt"))
        room = (shape(model).longest or 2**17) - asked["new_tokens"]  # for a prompt
        if field == "batch_size" and asked["prompt"] > room:
            continue
        if asked["weights"] == "bf16" and "bfloat16" not in GPUS[gpu].native_dtypes:
            continue
        end = room if field == "prompt" else 2**12

        def rank(size, asked=asked, field=field, gpu=gpu):
            return VERDICTS.index(judged(Serving(**asked | {field: size}), gpu))

        largest, least = (bisect(range(1, end + 1), word, key=rank) for word in (0, 1))
        if largest and least < end:
            return asked, gpu, field, largest, least + 1


def answered(seed: int) -> dict:
    """What became of a question, as plain JSON values."""
    asked, gpu, field, largest, least = border(seed)
    answer = {"seed": seed, "asked": asked, "gpu": gpu, "field": field}
    fit = [bool(fits(Serving(**asked | {field: size}), gpu)) for size in (largest, least)]
    return answer | {"largest": largest, "least": least, "fit": fit}


def main():
    given = [int(word) for word in sys.argv[1:]]
    number, first = given + [40, 0][len(given) :]
    answers = []
    for seed in range(first, first + number):
        answers.append(answered(seed))
        print(json.dumps(answers[-1]), flush=True)
    untrue = [one["seed"] for one in answers if not one["fit"][0]]
    careful = sum(one["fit"][1] for one in answers)
    print(f"{number} borders; “fits” was untrue at seeds {untrue or 'none'}", end="; ")
    print(f"“does not fit” would have fitted at {careful}")


if __name__ == "__main__":
    main()
