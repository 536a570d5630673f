"""The grid of runs that `memlab record` makes: fixed, so that records of cards can be compared."""

import dataclasses
from pathlib import Path
from typing import Any

from memlab import models
from memlab.evidence.records import find_records
from memlab.spec.recipe import Recipe

# A row: model, micro-batch x length, and what differs from Recipe's defaults (fp32, eager,
# adamw_torch, nothing frozen). The rows that say most come first, for a card that is lent for
# minutes; the others are ordered by model. Choices and switches of a recipe's fields stand alone,
# other fields as field=value. Another row is another line of the file.
ROWS = Path(models.__file__).parent / "data" / "grid.txt"


def grid_runs(tiny: bool = False) -> dict[str, Recipe]:
    """Name -> recipe of every run, in the order of running.

    tiny: the same runs on the models' tiny twins, sequences cut to a sixteenth (32 tokens at
        least) and one layer of two frozen, for machines without a GPU.
    """
    runs = {
        " ".join(line.split()): recipe_of(line)
        for line in ROWS.read_text(encoding="utf-8").splitlines()
        if line
    }
    published = find_records("published", loop="")
    nine = {f"published: {run.name}": Recipe(**run.recipe) for run in published}
    first = dict(list(runs.items())[:10])
    runs = first | nine | runs
    if tiny:
        return {name: _twin(recipe) for name, recipe in runs.items()}
    return runs


def _twin(recipe: Recipe) -> Recipe:
    frozen = tuple(min(part, 1) if isinstance(part, int) else part for part in recipe.freeze)
    return recipe.twin(seq_len=max(32, recipe.seq_len // 16), freeze=frozen)


def recipe_of(line: str) -> Recipe:
    """The recipe that a row of `ROWS` says."""
    model, size, *words = line.split()
    batch, length = size.split("x")
    fields: dict[str, Any] = {"model": model, "batch_size": int(batch), "seq_len": int(length)}
    for word in words:
        if word in WORDS:
            name, value = WORDS[word]
        else:
            name, value = word.split("=")
            value = int(value) if value.isdigit() else value
            value = float(value) if isinstance(getattr(Recipe, name), float) else value
        fields[name] = value
    return Recipe(**fields)


def _words() -> dict[str, tuple[str, object]]:
    """word -> (field, value) of every choice and switch; of two alike the first field's."""
    words: dict[str, tuple[str, object]] = {}
    for field in reversed(dataclasses.fields(Recipe)):
        if isinstance(field.default, bool):
            name = field.metadata["off"][0] if field.default else field.name
            words[name] = field.name, not field.default
        else:
            choices = filter(None, field.metadata["choices"])
            words |= {str(choice): (field.name, choice) for choice in choices}
            if field.metadata["bare"]:
                words[field.name] = field.name, field.metadata["bare"]
    return words


WORDS = _words()


def select(runs: dict[str, Recipe], only: str) -> dict[str, Recipe]:
    """The runs whose name holds every word of `only`. Raises ValueError if none does."""
    selected = {n: r for n, r in runs.items() if all(w in n.split() for w in only.split())}
    if not selected:
        words = sorted({word for name in runs for word in name.split()})
        raise ValueError(f"no run of the grid has {only!r}: its words are {', '.join(words)}")
    return selected
