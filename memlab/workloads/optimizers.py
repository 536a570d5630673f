"""The optimizer that a recipe names, for all trained parameters together or for each by itself."""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from memlab import libraries
from memlab.spec.optimizers import OPTIMIZERS, is_of_bitsandbytes
from memlab.spec.recipe import Recipe

LEARNING_RATE = 1e-5


class StepsInBackward:
    """An optimizer for each parameter, which steps in the backward pass.

    As PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass"
    and torchtune's `optimizer_in_bwd` have it: as soon as a gradient is there its parameter is
    stepped, and the gradient is freed.

    parameters: those that are trained. make: gives an optimizer of a list of parameters.
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
        """The groups of all optimizers."""
        return [
            group for optimizer in self._optimizers.values() for group in optimizer.param_groups
        ]

    @property
    def state(self) -> dict:
        """Parameter -> its states."""
        return {
            p: state
            for optimizer in self._optimizers.values()
            for p, state in optimizer.state.items()
        }


def make_optimizer(recipe: Recipe, model: torch.nn.Module) -> Any:
    """The optimizer that `recipe.optimizer` names, over the trainable parameters of `model`.

    Raises ValueError for an 8-bit optimizer, or one on the host, whose package is not installed.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if recipe.optimizer_offload != "none" and parameters[0].device.type != "cpu":
        torchao = libraries.import_needed("torchao.optim", "optimizer_offload")
        freed = recipe.optimizer_offload == "gradients"
        settings = {"offload_gradients": freed, "lr": LEARNING_RATE, "fused": True}
        return torchao.CPUOffloadOptimizer(parameters, torch.optim.AdamW, **settings)
    if recipe.step_in_backward:
        return StepsInBackward(parameters, functools.partial(_optimizer_of, recipe))
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return _optimizer_of(recipe, parameters, embeddings)


def _optimizer_of(
    recipe: Recipe, parameters: list[torch.nn.Parameter], embeddings: Iterable[torch.nn.Module] = ()
) -> torch.optim.Optimizer:
    """embeddings: modules whose weights have states in 32 bit with an optimizer of 8 bits."""
    row = OPTIMIZERS[recipe.optimizer]
    eight_bits = is_of_bitsandbytes(recipe.optimizer)
    if eight_bits:
        libraries.import_bitsandbytes(f"optimizer {recipe.optimizer}")
    module, _, name = row.made_by.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    if recipe.ranks > 1 and recipe.sharding == "zero1":  # states of this rank's share only
        kind = functools.partial(ZeroRedundancyOptimizer, optimizer_class=kind)
    optimizer = kind(parameters, lr=LEARNING_RATE, **row.settings)
    return _with_own_manager(optimizer, embeddings) if eight_bits else optimizer


def _with_own_manager(
    optimizer: Any, embeddings: Iterable[torch.nn.Module]
) -> torch.optim.Optimizer:
    """bitsandbytes' optimizer, with the states of embeddings' weights in 32 bits."""
    bitsandbytes = importlib.import_module("bitsandbytes")
    # The process's one manager would hand these overrides to later optimizers, by the position of
    # the weight, and hold the model for ever: this optimizer gets a manager of its own.
    manager = object.__new__(bitsandbytes.optim.GlobalOptimManager)
    manager.initialize()
    for module in embeddings:
        manager.register_module_override(module, "weight", {"optim_bits": 32})
    getattr(optimizer, "optim", optimizer).mng = manager  # a shared one has it do the work
    return optimizer
