"""`memlab simulate`: a step on a GPU that need not be there."""

from memlab.cli.options import (
    ANCHOR,
    GPU,
    LINK,
    anchored_by,
    card,
    options_of,
    recipe_of,
    result_of,
)
from memlab.spec.recipe import Recipe


def add_to(commands) -> None:
    """Add the command with the options of a recipe."""
    help = "predict a step on a GPU that need not be there"
    add = commands("simulate", run, help, [options_of(Recipe)])
    add("--gpu", type=card, help=GPU)
    add("--link", help=LINK)
    add("--anchor", metavar="FILE", help=ANCHOR)
    sizes = ("batch-size", "seq-len")
    add("--largest", choices=sizes, help="with the largest one that fits the card, as plan has it")


def run(options) -> dict:
    """The footprint of a recipe."""
    return simulated(recipe_of(options), options, options.link)


def simulated(recipe, options, link=None) -> dict:
    """A step of a recipe or the text of a serving, at its own or the largest size."""
    from memlab.predict.measure import versions
    from memlab.predict.simulate import simulate

    found, (gpu, said) = None, anchored_by(getattr(options, "anchor", None), options.gpu)
    if options.largest:
        from memlab.predict.fit import largest

        found = largest(recipe, gpu, options.largest.replace("-", "_"))
        recipe = found.recipe
        if not found.value:
            values = {"largest": found.as_dict()} if options.json else {"text": str(found)}
            return values | {"status": 3}
    footprint = simulate(recipe, gpu, link)
    more = {
        type(recipe).__name__.lower(): recipe.as_dict(),
        "gpu": options.gpu,
        "versions": versions(),
    }
    more |= {"largest": found.as_dict()} if found else {}
    more |= {"anchor": said} if said else {}
    shown = "\n".join(str(it) for it in (found, footprint, said) if it)
    return result_of(options, recipe, footprint.as_dict() | more, shown)
