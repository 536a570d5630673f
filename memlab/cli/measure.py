"""`memlab measure`: memory and time of an optimizer step on this machine."""

from argparse import Namespace

from memlab.cli.options import Commands, count, options_of, recipe_of
from memlab.spec.recipe import Recipe


def add_to(commands: Commands) -> None:
    """Add the command with the options of a recipe."""
    add = commands("measure", run, "measure a step on this machine", [options_of(Recipe)])
    add("--device", help="cuda or cpu; by default cuda if there is one")
    add("--steps", type=count, default=5, help="number of timed steps")


def run(options: Namespace) -> dict:
    """Measure a step of the recipe on this machine."""
    from memlab.predict.measure import measure

    recipe = recipe_of(options)
    measurement = measure(recipe, options.device, options.steps)
    values = measurement.as_dict() | {"recipe": recipe.as_dict()}
    return values if options.json else {"text": f"{recipe}\n{measurement}"}
