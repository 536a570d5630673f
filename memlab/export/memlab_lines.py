"""A recipe or a serving written down for memlab, as lines of Python."""

import dataclasses
import json

from transformers import PretrainedConfig

from memlab.gpus import GPU
from memlab.spec.recipe import Recipe
from memlab.spec.serving import Workload


def memlab_lines(
    recipe: Workload, gpu: GPU | str | int | None = None, verb: str = "simulate"
) -> str:
    """A recipe or a serving in Python, with the fields that are not the default, and its answer.

    gpu: as for `memlab.simulate`. verb: who answers, simulate or fits. A config stands there by
    the name `config`.
    """
    kind = type(recipe)
    names = f"from memlab import {verb}\nfrom memlab.spec.serving import Serving\n"
    if kind is Recipe:
        names = f"from memlab import Recipe, {verb}\n"
    fields = "".join(f"    {name}={_literal(value)},\n" for name, value in _said(recipe))
    card = "" if gpu is None else f", gpu={_literal(_card(gpu))}"
    name = kind.__name__.lower()
    return f"{names}\n{name} = {kind.__name__}(\n{fields})\nprint({verb}({name}{card}))\n"


def _said(recipe: Workload) -> list[tuple[str, object]]:
    """(field, value) of the model and of all that does not follow by itself; tuples as one text."""
    said: list[tuple[str, object]] = [("model", recipe.model)]
    for one in dataclasses.fields(recipe)[1:]:
        value = getattr(recipe, one.name)
        try:
            follows = recipe.but(**{one.name: one.default}) == recipe
        except ValueError:  # a base needs its rank
            follows = False
        if not follows:
            value = ",".join(map(str, value)) if isinstance(value, tuple) else value
            said.append((one.name, value))
    return said


def _literal(value: object) -> str:
    """A value in Python, texts in double quotes."""
    if isinstance(value, PretrainedConfig):
        return "config"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _card(gpu: GPU | str | int) -> str | int:
    return gpu.name if isinstance(gpu, GPU) else gpu
