"""How ranks share a model, by a recipe's `sharding`: DDP, ZeRO 1, or FSDP2's `fully_shard`.

Everything here is PyTorch's own code, set up as Accelerate sets it up. The optimizer states of
ZeRO 1 are split in `memlab.workloads.optimizers`. The tests run the same recipes in real processes.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memlab.spec.recipe import QUANTIZED, Recipe, is_moved_by_sharding


def join_ranks(recipe: Recipe) -> int:
    """This process's rank, from 0; initialises torch.distributed if it is not initialised.

    Raises ValueError if the process group has another size than the recipe.
    """
    if recipe.ranks == 1:
        return 0
    if not dist.is_initialized():
        dist.init_process_group()
    if dist.get_world_size() != recipe.ranks:
        raise ValueError(
            f"ranks is {recipe.ranks}: this process belongs to a group of {dist.get_world_size()}; "
            f"start it with torchrun --nproc-per-node {recipe.ranks}"
        )
    return dist.get_rank()


def share(
    model: torch.nn.Module, recipe: Recipe, device: torch.device, half: torch.dtype | None = None
) -> torch.nn.Module:
    """The model as one rank of the recipe holds it, on `device`.

    half: the dtype in which fp32 parameters are gathered and computed; None keeps their own. As in
        Accelerate (`FullyShardedDataParallelPlugin.set_mixed_precision`), gradients are reduced in
        the same dtype.

    With zero2 and zero3, each layer is one FSDP unit. The modules around the layers form another.
    """
    if recipe.ranks == 1:
        return model
    if not is_moved_by_sharding(recipe):
        return DistributedDataParallel(model)
    shape: tuple[int, ...] = (recipe.ranks // recipe.replicas,)
    if recipe.replicas > 1:  # HSDP: consecutive ranks share one copy of the model
        shape = (recipe.replicas, *shape)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("copy", "part")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    after_forward = recipe.sharding == "zero3"  # zero2 keeps a layer gathered until its backward
    # The root comes last: `fully_shard` gives it the parameters that no layer has taken.
    for layer in [*layers_of(model), model]:
        layer.to(device)  # this move also quantizes 4-bit weights
        fully_shard(layer, mesh=mesh, reshard_after_forward=after_forward, mp_policy=policy)
    if recipe.base in QUANTIZED:
        from memlab.workloads import quantized  # which brings transformers

        for layer in quantized.quantized_layers(model):
            # FSDP has replaced the Params4bit by DTensors without a quant state. bitsandbytes
            # restores it (`fix_4bit_weight_quant_state_from_module`, bitsandbytes/nn/modules.py)
            # at the first forward pass. The scales are not sharded: each rank has all of them.
            layer.weight.quant_state = layer.quant_state
    return model


@contextlib.contextmanager
def not_reduced(model: torch.nn.Module) -> Iterator[None]:
    """Accumulate unreduced gradients: each rank keeps its own, unsharded.

    Accelerate's `no_sync`, and with it the Trainer, does this in all micro-batches but the last.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def check_split(model: torch.nn.Module, ranks: int) -> None:
    """Raise ValueError unless this process holds only its shard of a model.

    ranks: the number of shards. Each weight is split along its first dimension, in whole rows.

    A launcher may start this many processes and split nothing, as Accelerate's FSDP does without a
    GPU. Each process then trains the whole model, without a warning.
    """
    weights = list(model.parameters())
    held = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
    # The largest shard of a weight: rows / ranks, rounded up, times the elements of a row.
    part = sum(-(len(w) // -ranks) * w[:1].numel() for w in weights)
    if held > part:
        raise ValueError(
            f"this process holds {held:,} of {sum(w.numel() for w in weights):,} weights: if "
            f"{ranks} ranks split them, each has at most {part:,}, so the model is not split"
        )


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of every stack in a transformer, in order; lists inside a layer do not count."""
    layers: list[torch.nn.Module] = []
    for module in model.modules():
        # A layer may hold a ModuleList of its own, such as a list of experts.
        inside = any(module is part for layer in layers for part in layer.modules())
        if isinstance(module, torch.nn.ModuleList) and not inside:
            layers += module
    return layers


def sharded_sizes(model: torch.nn.Module, parts: int) -> set[int]:
    """The sizes of one rank's shards under `share`: rows of each weight, elements of each unit.

    The elements of an FSDP unit are counted twice: over all weights, as its all-gather sends them,
    and over the trainable weights, as its reduce-scatter leaves them. A trace needs these numbers
    to tell them from the sizes of a batch.

    parts: the number of shards. Each weight is split along its first dimension, in whole rows.
    """
    sizes: set[int] = set()
    seen: set[torch.nn.Parameter] = set()
    # The same units as in `share`: each layer, then what is left around the layers.
    for module in [*layers_of(model), model]:
        weights = [weight for weight in module.parameters() if weight not in seen]
        seen.update(weights)
        for some in weights, [weight for weight in weights if weight.requires_grad]:
            rows = [-(len(weight) // -parts) for weight in some]
            sizes |= {*rows, sum(n * w[:1].numel() for n, w in zip(rows, some, strict=True))}
    return sizes
