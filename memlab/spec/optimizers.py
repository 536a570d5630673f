"""What there is to know of an optimizer, in one table: a row adds one.

Recipes, the training loop, scripts, the planner, recording and the calculator read it.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Optimizer:
    """An optimizer by the Trainer's name.

    made_by: the path of its class. settings: its arguments, beside the parameters and the learning
    rate. help: what a recipe's reader should know; meaning: of its states and its step, as a
    script's comment. states: how many numbers it keeps per trained weight, of `bits` each; 0 where
    they are fewer than weights, by rows and columns. sharded: whether it takes a rank's parts of
    weights, as fully_shard leaves them. paged: whether states may leave the card. planned: whether
    a plan tries it. worse: whether it may train worse than AdamW at the same learning rate.
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
    # What torch.optim.AdamW(params) does on CUDA. The plain loop over parameters, which it takes on
    # a CPU, has a name of its own: they differ by a copy of the gradients.
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
        help="bitsandbytes', with the embeddings' states in 32 bit but for step_in_backward, as "
        "lion_8bit and paged_adamw_8bit",
        planned=True,
    ),
    "adafactor": Optimizer(
        "transformers.optimization.Adafactor",
        "states by rows and columns",
        states=0,
        help="transformers', with a given learning rate and no momentum",
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
    """The package that an optimizer's class comes from; empty for no optimizer, as of a serving."""
    return OPTIMIZERS[optimizer].made_by.partition(".")[0] if optimizer else ""


def is_of_bitsandbytes(optimizer: str) -> bool:
    """Whether the package bitsandbytes has it."""
    return library_of(optimizer) == "bitsandbytes"
