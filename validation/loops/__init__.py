"""Other people's training loops, rebuilt from their descriptions, on the simulated GPU.

If a record names one of these loops (`Record.loop`), the loop predicts it in place of memlab's own.
Each loop is a module of this package. Its docstring says where the runs are published and what had
to be assumed, and its function `footprint_of(run, card)` gives the prediction. To add a loop, add a
module and its name in `LOOPS`.
"""

import importlib
import warnings

from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU

# the loop's name in records -> module of this package
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
    """The footprint of a published run's loop on a GPU, like `memlab.simulate` for memlab's own.

    Raises ValueError for an unknown loop and torch.OutOfMemoryError if the GPU is too small.
    """
    if run.loop not in LOOPS:
        raise ValueError(f"loop is {run.loop!r}: known are {', '.join(LOOPS)}")
    loop = importlib.import_module(f"{__name__}.{LOOPS[run.loop]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names and changed defaults of libraries
        return loop.footprint_of(run, card)
