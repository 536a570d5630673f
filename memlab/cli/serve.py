"""`memlab serve`: predict the memory of inference, prefill and decode."""

from argparse import Namespace

from memlab.cli.options import GPU, Commands, card, options_of, recipe_of
from memlab.cli.simulate import simulated
from memlab.spec.serving import Serving


def add_to(commands: Commands) -> None:
    """Add the command with the options of a serving."""
    help = "predict inference: prefill and decode"
    add = commands("serve", run, help, [options_of(Serving)])
    add("--gpu", type=card, help=GPU)
    sizes = ("batch-size", "prompt")
    add("--largest", choices=sizes, help="use the largest one that fits the card")


def run(options: Namespace) -> dict:
    """Predict the footprint of a serving."""
    return simulated(recipe_of(options, Serving), options)
