"""Training loops of others, rebuilt from their descriptions, on the simulated card.

A record that names one of them (`Record.loop`) is predicted by it instead of by memlab's own loop.
Each is a module here that says where its runs are published and what had to be assumed of them,
and ends in `footprint_of(run, card)`. Another loop is another module, and its name in `LOOPS`.
"""

import importlib
import warnings

from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU

# name, as records say it -> module of this package
LOOPS = {
    "fitcheck": "fitcheck",
    "NeuSight": "neusight",
    "PEFT's comparison": "peft_comparison",
    "memlab without a limit": "whole_recipe",
    "torch-preflight": "torch_preflight",
    "torchtitan": "torchtitan",
    "torchtune": "torchtune",
}


def simulate_loop(run: Record, card: GPU) -> Footprint:
    """What the loop of a published run takes on a card, as `memlab.simulate` says it of memlab's.

    Raises ValueError for an unknown loop, torch.OutOfMemoryError if the card is too small.
    """
    if run.loop not in LOOPS:
        raise ValueError(f"loop is {run.loop!r}: known are {', '.join(LOOPS)}")
    loop = importlib.import_module(f"{__name__}.{LOOPS[run.loop]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names and defaults that libraries have changed
        return loop.footprint_of(run, card)
