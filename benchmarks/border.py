"""Does a training fit where the calculator says "fits"? Random borders, with a seed.

    python benchmarks/border.py [questions] [first seed] [cards, such as T4,V100]

A question is a setting of the calculator's switches on a card, and the largest micro-batch, or the
longest sequence, of which it says "fits". Each is simulated: a "fits" is false where the training
runs out of memory on that card. Where it runs, but takes of the margin that `memlab.fits` keeps
free, is counted, too. Each answer is printed as a line, after a few seconds. By itself half of the
cards are a T4 or a V100, which have no flash attention.
"""

import json
import random
import sys
from bisect import bisect

from formula import computes

from memlab import Recipe, fits, formula, models
from memlab.gpus import GPUS, find_gpu
from memlab.panels.calculator import CHOICES, TRAINED, names
from memlab.predict.fit import room
from memlab.predict.formula import is_kept
from memlab.predict.simulate import full_log, peak_reserved_of

VERDICTS = ("fits", "may fit", "does not fit")
OLD = ("T4", "V100")
END = {"batch_size": 1024, "seq_len": 16384}


def verdict(recipe: Recipe, card) -> str:
    """The calculator's word: as `judge` of memlab/panels/assets/formula.js."""
    least, most = (end + card.context for end in formula(recipe, card).reserved_range)
    allowed = room(card)
    return "fits" if most <= allowed else "may fit" if least <= allowed else "does not fit"


def border(seed: int, cards=()) -> tuple[Recipe, str]:
    """(a recipe of the largest size that the calculator says fits, a card); one larger may not."""
    draw = random.Random(seed)
    others = [name for name in GPUS if name not in OLD]
    cards = cards or (OLD if seed % 2 else others)
    while True:
        gpu, model = draw.choice(cards), draw.choice(names())
        values = {name: draw.choice(choices) for name, choices in CHOICES.items()}
        values |= TRAINED[draw.choice(list(TRAINED))]
        if "lora_rank" in values:
            values["lora_rank"] = draw.choice((4, 16, 64))
        values["accumulation"] = draw.choice((1, 1, 4))
        longest = min(models.max_length(model) or END["seq_len"], END["seq_len"])
        field = draw.choice(("batch_size", "seq_len"))
        end = longest if field == "seq_len" else END[field]
        window = getattr(models.config(model), "sliding_window", None)
        values |= {"batch_size": draw.choice((1, 2, 5)), "seq_len": draw.randint(16, longest)}
        values["seq_len"] = min(values["seq_len"], window or longest)
        end = min(end, window or end) if field == "seq_len" else end
        try:
            recipe, card = Recipe(model, **values), find_gpu(gpu)
        except ValueError:  # a base in half precision without autocast
            continue
        if not computes(card, recipe) or not is_kept(recipe, card):
            continue

        def of(size, recipe=recipe, field=field):
            return recipe.but(**{field: size})

        def rank(size, of=of, card=card):
            return VERDICTS.index(verdict(of(size), card))

        size = bisect(range(1, end + 1), 0, key=rank)
        if 0 < size < end:
            return of(size), gpu


def answered(seed: int, cards=()) -> dict:
    """What became of a question, as plain JSON values."""
    recipe, gpu = border(seed, cards)
    card, quick = find_gpu(gpu), formula(recipe, gpu)
    found = {"seed": seed, "gpu": gpu, "fits": bool(fits(recipe, gpu)), "runs": True}
    if not found["fits"]:
        found["runs"] = peak_reserved_of(recipe, full_log(recipe, card), card) is not None
    return found | {"reserved": quick.reserved_range, "recipe": str(recipe)}


def main():
    given = sys.argv[1:]
    number, first = ([*map(int, given[:2])] + [40, 0][len(given[:2]) :])[:2]
    cards = given[2].split(",") if given[2:] else ()
    answers = []
    for seed in range(first, first + number):
        answers.append(answered(seed, cards))
        print(json.dumps(answers[-1]), flush=True)
    for kind, gpus in (("T4 and V100", OLD), ("others", set(GPUS) - set(OLD))):
        asked = [one for one in answers if one["gpu"] in gpus]
        false = [one["seed"] for one in asked if not one["runs"]]
        tight = [one["seed"] for one in asked if one["runs"] and not one["fits"]]
        print(f"{kind}: {len(asked)} borders; “fits” was false at seeds {false or 'none'}", end="")
        print(f"; it took of the margin at {tight or 'none'}")


if __name__ == "__main__":
    main()
