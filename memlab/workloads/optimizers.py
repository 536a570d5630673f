"""Build the optimizer that a recipe names: one for all trained parameters, or one for each.

The table of optimizers is `memlab.spec.optimizers.OPTIMIZERS`. This module adds the optimizer on
the host (torchao), the step in the backward pass, and states that are split among ranks (ZeRO 1).
With bitsandbytes it keeps the states of embeddings in 32 bits, as the Trainer does.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from memlab import libraries
from memlab.spec.optimizers import OPTIMIZERS, is_of_bitsandbytes
from memlab.spec.recipe import Recipe

LEARNING_RATE = 1e-5  # memory does not depend on it


class StepsInBackward:
    """One optimizer per parameter, which steps inside the backward pass.

    As soon as the gradient of a parameter is complete, its optimizer steps and frees the gradient.
    PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass" and
    torchtune's `optimizer_in_bwd` do the same.

    parameters: the trained parameters.
    make: builds an optimizer from a list of parameters.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ):
        self._optimizers = {parameter: make([parameter]) for parameter in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: Any) -> None:
        self._optimizers[parameter].step()
        self._optimizers[parameter].zero_grad()

    @property
    def param_groups(self) -> list[dict]:
        """The parameter groups of all optimizers."""
        return [
            group for optimizer in self._optimizers.values() for group in optimizer.param_groups
        ]

    @property
    def state(self) -> dict:
        """Parameter -> its optimizer states."""
        return {
            p: state
            for optimizer in self._optimizers.values()
            for p, state in optimizer.state.items()
        }


def make_optimizer(recipe: Recipe, model: torch.nn.Module) -> Any:
    """The optimizer that `recipe.optimizer` names, over the trainable parameters of `model`.

    A model on a CPU gets no offloaded optimizer, because there is nothing to offload.

    Raises ValueError if the optimizer needs bitsandbytes or torchao and the package is missing.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if recipe.optimizer_offload != "none" and parameters[0].device.type != "cpu":
        torchao = libraries.import_needed("torchao.optim", "optimizer_offload")
        freed = recipe.optimizer_offload == "gradients"
        settings = {"offload_gradients": freed, "lr": LEARNING_RATE, "fused": True}
        return torchao.CPUOffloadOptimizer(parameters, torch.optim.AdamW, **settings)
    if recipe.step_in_backward:
        return StepsInBackward(parameters, functools.partial(_optimizer_of, recipe))
    # With an 8-bit optimizer the states of embeddings stay in 32 bits, as the Trainer sets it up.
    # An optimizer per parameter gets no such override (`make` above passes no embeddings).
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return _optimizer_of(recipe, parameters, embeddings)


def _optimizer_of(
    recipe: Recipe, parameters: list[torch.nn.Parameter], embeddings: Iterable[torch.nn.Module] = ()
) -> torch.optim.Optimizer:
    """One optimizer over `parameters`; 8-bit optimizers keep 32-bit states for `embeddings`."""
    row = OPTIMIZERS[recipe.optimizer]
    eight_bits = is_of_bitsandbytes(recipe.optimizer)
    if eight_bits:
        libraries.import_bitsandbytes(f"optimizer {recipe.optimizer}")
    module, _, name = row.made_by.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    if recipe.ranks > 1 and recipe.sharding == "zero1":  # this rank holds its share of the states
        kind = functools.partial(ZeroRedundancyOptimizer, optimizer_class=kind)
    optimizer = kind(parameters, lr=LEARNING_RATE, **row.settings)
    return _with_own_manager(optimizer, embeddings) if eight_bits else optimizer


def _with_own_manager(
    optimizer: Any, embeddings: Iterable[torch.nn.Module]
) -> torch.optim.Optimizer:
    """Give the states of the embeddings' weights 32 bits in a bitsandbytes optimizer."""
    bitsandbytes = importlib.import_module("bitsandbytes")
    # `GlobalOptimManager` (bitsandbytes/optim/optimizer.py) is one object for the whole process. It
    # stores overrides by the position of a weight, so it would apply these to later optimizers. It
    # would also keep the model alive for ever. So this optimizer gets its own manager; the class
    # forbids its constructor, hence `__new__` and `initialize`.
    manager = object.__new__(bitsandbytes.optim.GlobalOptimManager)
    manager.initialize()
    for module in embeddings:
        manager.register_module_override(module, "weight", {"optim_bits": 32})
    # ZeroRedundancyOptimizer wraps the bitsandbytes optimizer in its attribute `optim`.
    getattr(optimizer, "optim", optimizer).mng = manager
    return optimizer
