"""One table of everything that memlab knows about optimizers; a new row adds an optimizer.

Recipes, the training loop, scripts, the planner, `memlab record` and the calculator read it.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, under the Trainer's name for it.

    made_by: import path of its class.
    meaning: its states or its step, in the words of a comment in a script.
    states: numbers that it keeps per trained weight. 0 for Adafactor, which keeps rows and columns
        of them, far fewer than weights.
    bits: of each such number; 32 means the dtype of the weight.
    help: what the help of `Recipe.optimizer` says about it.
    settings: arguments of its class, besides the parameters and the learning rate.
    sharded: whether it can step a rank's parts of weights, as fully_shard leaves them.
    paged: whether its states may be paged out of the GPU.
    planned: whether a plan tries it.
    worse: whether it may train worse than AdamW at the same learning rate.
    """

    made_by: str
    meaning: str
    states: int
    bits: int = 32
    help: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    paged: bool = False
    planned: bool = False
    worse: bool = False


_ADAMW, _BITSANDBYTES = "torch.optim.AdamW", "bitsandbytes.optim."
# In the order in which a plan tries them, the plainest first.
OPTIMIZERS = {
    # torch.optim.AdamW(params) takes the multi-tensor step on CUDA and a loop over the parameters
    # on a CPU (torch/optim/optimizer.py, _default_to_fused_or_foreach). The two differ by a copy of
    # the gradients, so the loop has a name of its own here.
    "adamw_torch": Optimizer(
        _ADAMW,
        "its step holds a copy of the gradients",
        states=2,
        help="multi-tensor",
        settings={"foreach": True},
        sharded=True,
    ),
    "adamw_torch_loop": Optimizer(
        _ADAMW,
        "its step takes one weight after the other",
        states=2,
        help="one parameter after the other",
        settings={"foreach": False},
        sharded=True,
    ),
    "adamw_torch_fused": Optimizer(
        _ADAMW,
        "its step holds no copy of the gradients",
        states=2,
        settings={"fused": True},
        sharded=True,
        planned=True,
    ),
    "sgd": Optimizer(
        "torch.optim.SGD",
        "one state per weight",
        states=1,
        help="momentum 0.9, multi-tensor",
        settings={"momentum": 0.9, "foreach": True},
        sharded=True,
        worse=True,
    ),
    "adamw_8bit": Optimizer(
        _BITSANDBYTES + "AdamW8bit",
        "two 8-bit states per weight",
        states=2,
        bits=8,
        help="of bitsandbytes; embeddings keep 32-bit states, except with step_in_backward; the "
        "same for lion_8bit and paged_adamw_8bit",
        planned=True,
    ),
    "adafactor": Optimizer(
        "transformers.optimization.Adafactor",
        "states by rows and columns",
        states=0,
        help="of transformers; with a given learning rate, without momentum",
        settings={"scale_parameter": False, "relative_step": False},
        planned=True,
    ),
    "paged_adamw_8bit": Optimizer(
        _BITSANDBYTES + "PagedAdamW8bit",
        "two 8-bit states per weight that can leave the GPU",
        states=2,
        bits=8,
        paged=True,
        planned=True,
    ),
    "lion_8bit": Optimizer(
        _BITSANDBYTES + "Lion8bit",
        "one 8-bit state per weight",
        states=1,
        bits=8,
        worse=True,
    ),
}


def library_of(optimizer: str) -> str:
    """The package that has an optimizer's class; empty for no optimizer, as in a `Serving`."""
    return OPTIMIZERS[optimizer].made_by.partition(".")[0] if optimizer else ""


def is_of_bitsandbytes(optimizer: str) -> bool:
    """Whether the optimizer is one of bitsandbytes."""
    return library_of(optimizer) == "bitsandbytes"
