"""`memlab report`: what a bug report of a wrong prediction needs, without names and paths."""

import os
from argparse import Namespace

from memlab.cli.options import GPU, LINK, Commands, card, options_of, recipe_of
from memlab.libraries import first_line
from memlab.spec.recipe import Recipe
from memlab.units import mib


def add_to(commands: Commands) -> None:
    """Add the command with the options of a recipe."""
    help = "print versions, device, recipe and prediction, to paste into an issue"
    add = commands("report", run, help, [options_of(Recipe)])
    add("--gpu", type=card, help=GPU)
    add("--link", help=LINK)


def run(options: Namespace) -> dict:
    """Collect versions, device, recipe and prediction, as JSON values or as text to paste."""
    from memlab.evidence.worker import about
    from memlab.predict.measure import pick_device
    from memlab.predict.simulate import simulate

    recipe = recipe_of(options)
    asked = recipe.as_dict()
    if isinstance(asked["model"], str) and os.path.exists(asked["model"]):
        # A path may hold a user's name, so only its last part is reported.
        asked["model"] = os.path.basename(os.path.normpath(asked["model"]))
    values = about({"device": str(pick_device())}) | {"gpu": options.gpu, "recipe": asked}
    try:
        values["predicted"] = simulate(recipe, options.gpu, options.link).as_dict()
    except (ValueError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        values["refused"] = first_line(error)
    return values if options.json else {"text": _text(values)}


def _text(values: dict) -> str:
    """The values as a Markdown list, with "what happened" left for the user to fill in."""
    recipe = values["recipe"]
    usual = Recipe().as_dict() | {"model": None}
    footprint = values.get("predicted")
    predicted = values.get("refused")
    if footprint:
        peaks = (footprint["peak_allocated"], footprint["peak_reserved"])
        predicted = "{} allocated, {} reserved".format(*map(mib, peaks))
    rows = {
        "versions": ", ".join(f"{name} {v}" for name, v in values["versions"].items()),
        "device": f"{values['device_name']}, driver {values['driver'] or 'none'}",
        "card asked for": values["gpu"] or "none",
        "recipe": ", ".join(f"{n} {v}" for n, v in recipe.items() if v != usual[n]),
        "predicted": predicted,
        "what happened": "...",
    }
    return "\n".join(f"- {name}: {value}" for name, value in rows.items())
