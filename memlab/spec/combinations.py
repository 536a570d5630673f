"""Checks of fields that depend on each other: a one-line ValueError for what cannot be trained.

Each error names the fields, their values, the reason, and what is allowed instead.
"""

import inspect
from collections.abc import Mapping

from memlab import models
from memlab.libraries import remembered
from memlab.spec.logits import unlike_product
from memlab.spec.optimizers import OPTIMIZERS
from memlab.spec.recipe import (
    AUTOCAST,
    FULLY_SHARDED,
    Recipe,
)


def check_base(recipe: Recipe) -> None:
    """Raise ValueError for a base without adapters, and for a half base without autocast."""
    if recipe.base != "none" and not recipe.lora_rank:
        raise ValueError(
            f"base is {recipe.base!r} and lora_rank is 0: a base is the frozen model under "
            "adapters, allowed is a lora_rank from 1"
        )
    if recipe.base == "half" and recipe.precision not in AUTOCAST:
        raise ValueError(
            f"base is 'half' and precision is {recipe.precision!r}: without autocast the base "
            f"has the format of precision, allowed are {', '.join(AUTOCAST)}"
        )


def check_ranks(recipe: Recipe) -> None:
    """Raise ValueError for a sharding that the ranks, the base or the optimizer do not allow."""
    if recipe.sharding == "ddp":
        return
    if recipe.ranks == 1:
        raise ValueError(
            f"sharding is {recipe.sharding!r} and ranks is 1: one rank has nothing to split, "
            "allowed are ranks from 2"
        )
    if recipe.base == "int8" and recipe.sharding in FULLY_SHARDED:
        raise ValueError(
            f"base is 'int8' and sharding is {recipe.sharding!r}: bitsandbytes' 8-bit layers "
            "cannot be split, allowed are none, half, nf4, fp4, or sharding ddp or zero1"
        )
    sharded = [name for name, optimizer in OPTIMIZERS.items() if optimizer.sharded]
    if recipe.optimizer not in sharded and recipe.sharding in FULLY_SHARDED:
        raise ValueError(
            f"optimizer is {recipe.optimizer!r} and sharding is {recipe.sharding!r}: it "
            f"cannot step parts of weights, allowed are {', '.join(sharded)}, or sharding ddp "
            "or zero1"
        )


def check_replicas(recipe: Recipe) -> None:
    """Raise ValueError unless the replicas are equal copies of a fully sharded model."""
    if recipe.replicas == 1:
        return
    if recipe.sharding not in FULLY_SHARDED:
        raise ValueError(
            f"replicas is {recipe.replicas} and sharding is {recipe.sharding!r}: only "
            f"{' and '.join(FULLY_SHARDED)} split copies of a model, allowed is 1"
        )
    if recipe.ranks % recipe.replicas or recipe.ranks == recipe.replicas:
        raise ValueError(
            f"replicas is {recipe.replicas} and ranks is {recipe.ranks}: each copy needs the same "
            "number of ranks, at least two, allowed are divisors of ranks below it"
        )


def check_step_in_backward(recipe: Recipe) -> None:
    """Raise ValueError if a parameter cannot be stepped as soon as its gradient is there."""
    if not recipe.step_in_backward:
        return
    wanted = {
        "accumulation": (1, "a gradient is used before another could be added to it"),
        "max_grad_norm": (0, "the gradients never exist all at once, so they have no common norm"),
        "ranks": (1, "a gradient is used before the ranks could reduce it"),
        "set_to_none": (True, "the step frees each gradient"),
    }
    _check_with(recipe, "step_in_backward", wanted)
    _refuse_scaler(
        recipe, "step_in_backward", "the gradient scaler checks all gradients before a step"
    )


def check_offload(recipe: Recipe) -> None:
    """Raise ValueError for what torchao's CPUOffloadOptimizer does not train.

    torchao/optim/cpu_offload.py says that offloaded gradients cannot be accumulated.
    """
    if recipe.optimizer_offload == "none":
        return
    wanted = {
        "optimizer": ("adamw_torch_fused", "the host's step is PyTorch's fused one"),
        "max_grad_norm": (0, "gradients leave the GPU before their norm is known"),
        "ranks": (1, "torchao's optimizer is for one card"),
        "set_to_none": (True, "its zero_grad frees gradients"),
        "step_in_backward": (False, "the step is on the host"),
    }
    if recipe.optimizer_offload == "gradients":
        wanted["accumulation"] = (
            1,
            "a gradient leaves the GPU before another could be added to it",
        )
    _check_with(recipe, "optimizer_offload", wanted)
    _refuse_scaler(recipe, "optimizer_offload", "gradients leave before the scaler checks them")


def check_trainer(recipe: Recipe, otherwise: str = "") -> None:
    """Raise ValueError for what transformers' Trainer does not do.

    otherwise: the end of the message, which may name what does it.
    """
    for name, (allowed, why) in {
        "set_to_none": (True, "always frees gradients"),
        "loss": ("whole", "takes the model's own loss"),
        "step_in_backward": (False, "steps after the backward pass"),
        "optimizer_offload": ("none", "keeps states on the card"),
    }.items():
        value = getattr(recipe, name)
        if value != allowed:
            raise ValueError(
                f"{name} is {value!r}: the Trainer {why}, allowed is {allowed}{otherwise}"
            )


def _check_with(recipe: Recipe, field: str, wanted: Mapping[str, tuple[object, str]]) -> None:
    """Raise ValueError unless other fields have the values that `field` needs.

    wanted: name of another field -> (its only value, why).
    """
    for name, (allowed, why) in wanted.items():
        value = getattr(recipe, name)
        if value != allowed:
            raise ValueError(
                f"{field} is {getattr(recipe, field)!r} and {name} is {value!r}: {why}, allowed "
                f"is {allowed}"
            )


def _refuse_scaler(recipe: Recipe, field: str, why: str) -> None:
    if recipe.precision == "fp16-amp":
        raise ValueError(
            f"{field} is {getattr(recipe, field)!r} and precision is 'fp16-amp': {why}, allowed "
            "are fp32, bf16-amp, fp16, bf16"
        )


def check_attention(recipe: Recipe) -> None:
    """Raise ValueError for flash-attn in fp32, which it does not compute in."""
    if recipe.attention == "flash_attention_2" and recipe.precision == "fp32":
        raise ValueError(
            "attention is 'flash_attention_2' and precision is 'fp32': flash-attn computes in half "
            "precision, allowed are fp16-amp, bf16-amp, fp16, bf16"
        )


def check_packed(recipe: Recipe) -> None:
    """Raise ValueError if a row cannot hold several texts."""
    if not recipe.packed:
        return
    if recipe.task != "causal-lm":
        raise ValueError(
            f"packed is True and task is {recipe.task!r}: position_ids separate texts in a "
            "causal-lm only, allowed is False"
        )
    wanted = {"padded": (False, "texts without padding share a row")}
    _check_with(recipe, "packed", wanted)
    mixes = _mixes_texts(recipe.model)
    if mixes:
        raise ValueError(f"packed is True: {recipe.model_name} {mixes}; allowed is False")


@remembered
def _mixes_texts(model: models.Model) -> str:
    """Why a causal model cannot tell the texts of a row apart by position_ids; empty if it can."""
    import torch

    # Building a model seeds PyTorch's global generator, which is the caller's.
    with torch.random.fork_rng(devices=[]):
        built = models.skeleton(model, "causal-lm")
    if "position_ids" not in inspect.signature(built.forward).parameters:
        return "takes no position_ids"
    # Short convolutions over the sequence, as in LFM2 or in Qwen3-Next's linear attention.
    if any(isinstance(module, torch.nn.Conv1d) for module in built.modules()):
        return "has layers that carry over from one text of a row to the next"
    return ""


def check_loss(recipe: Recipe) -> None:
    """Raise ValueError if a model's loss cannot be computed in parts."""
    if recipe.loss == "whole":
        return
    if recipe.task != "causal-lm":
        raise ValueError(
            f"loss is {recipe.loss!r} and task is {recipe.task!r}: only a causal-lm can compute "
            "its logits in parts, allowed is whole"
        )
    if recipe.loss == "linear_cross_entropy":
        import torch

        if not hasattr(torch.nn.functional, recipe.loss):
            raise ValueError(
                f"loss is {recipe.loss!r}: torch.nn.functional has it since PyTorch 2.13, "
                f"installed is {torch.__version__}; allowed are whole, chunked"
            )
    unlike = unlike_product(recipe.model)
    if unlike:
        raise ValueError(
            f"loss is {recipe.loss!r}: {recipe.model_name} cannot compute it in parts, {unlike}; "
            "allowed is whole"
        )


# The checks that need no model come first: a wrong field is refused before a model is looked up.
OF_FIELDS = check_base, check_replicas, check_ranks, check_step_in_backward, check_offload
OF_MODEL = check_loss, check_attention, check_packed
