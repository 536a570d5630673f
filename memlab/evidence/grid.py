"""The grid of runs that `memlab record` makes.

The grid is the same on every machine, so that records of different GPUs can be compared.
"""

import dataclasses
from pathlib import Path
from typing import Any

from memlab import models
from memlab.evidence.records import find_records
from memlab.spec.recipe import Recipe

# One run per line: the model, micro-batch x length, and what differs from Recipe's defaults (fp32,
# eager, adamw_torch, nothing frozen). Choices and switches of a field are one word, other fields
# are field=value. The most telling rows come first, for a GPU that is rented for minutes; the rest
# is ordered by model. A new run is a new line of the file.
ROWS = Path(models.__file__).parent / "data" / "grid.txt"


def grid_runs(tiny: bool = False) -> dict[str, Recipe]:
    """Name -> recipe of every run, in the order in which they run.

    tiny: the same runs on the models' tiny twins, for machines without a GPU. Sequences are cut to
        a sixteenth (at least 32 tokens), and at most one of the two layers is frozen.
    """
    runs = {
        " ".join(line.split()): recipe_of(line)
        for line in ROWS.read_text(encoding="utf-8").splitlines()
        if line
    }
    # The published runs of memlab's own loop follow the ten most telling rows.
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
    """The recipe of one row of `ROWS`."""
    model, size, *words = line.split()
    batch, length = size.split("x")
    fields: dict[str, Any] = {"model": model, "batch_size": int(batch), "seq_len": int(length)}
    for word in words:
        if word in WORDS:
            name, value = WORDS[word]
        else:
            name, value = word.split("=")
            value = int(value) if value.isdigit() else value
            # max_grad_norm and lora_dropout are floats: a field's default says its type.
            value = float(value) if isinstance(getattr(Recipe, name), float) else value
        fields[name] = value
    return Recipe(**fields)


def _words() -> dict[str, tuple[str, object]]:
    """Word -> (field, value) of every choice and switch of a recipe.

    If two fields share a word, it means the first field.
    """
    words: dict[str, tuple[str, object]] = {}
    # In reverse, so that an earlier field overwrites a later one.
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
    """The runs whose names contain every word of `only`. Raises ValueError if there are none."""
    selected = {n: r for n, r in runs.items() if all(w in n.split() for w in only.split())}
    if not selected:
        words = sorted({word for name in runs for word in name.split()})
        raise ValueError(
            f"no run of the grid has all words of {only!r}: allowed are {', '.join(words)}"
        )
    return selected
