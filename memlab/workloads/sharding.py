"""How the ranks of a training share its model: PyTorch's own ways, by a recipe's `sharding`."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memlab.spec.recipe import QUANTIZED, Recipe, is_moved_by_sharding


def join_ranks(recipe: Recipe) -> int:
    """The number of this process among the recipe's ranks; starts torch.distributed if need be.

    Raises ValueError where the process belongs to a group of another size.
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
    """The model as one of the recipe's ranks has it, on `device`.

    half: the format that fp32 parameters are gathered and computed in, or None for their own.
    Gradients of such are summed in it, too, as by Accelerate. Each layer is gathered
    by itself, what stands around the layers together.
    """
    if recipe.ranks == 1:
        return model
    if not is_moved_by_sharding(recipe):
        return DistributedDataParallel(model)
    shape: tuple[int, ...] = (recipe.ranks // recipe.replicas,)
    if recipe.replicas > 1:  # ranks in a row share a copy
        shape = (recipe.replicas, *shape)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("copy", "part")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    after_forward = recipe.sharding == "zero3"
    for layer in [*layers_of(model), model]:
        layer.to(device)  # quantized, if it is to be, and moved
        fully_shard(layer, mesh=mesh, reshard_after_forward=after_forward, mp_policy=policy)
    if recipe.base in QUANTIZED:
        from memlab.workloads import quantized  # which brings transformers

        for layer in quantized.quantized_layers(model):
            layer.weight.quant_state = layer.quant_state  # which each rank keeps whole
    return model


@contextlib.contextmanager
def not_reduced(model: torch.nn.Module) -> Iterator[None]:
    """A backward pass whose gradients each rank keeps for itself, whole, to add to them.

    As Accelerate's `no_sync`, and so the Trainer's, in all micro-batches but the last.
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
    """Raise ValueError unless this process holds only its part of a model.

    ranks: among which the first dimension of every weight is divided, up to a whole row. A launcher
    may start so many processes and split nothing, as Accelerate's FSDP where there is no GPU: each
    then trains the whole model, and nothing says so.
    """
    weights = list(model.parameters())
    held = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
    part = sum(-(len(w) // -ranks) * w[:1].numel() for w in weights)
    if held > part:
        raise ValueError(
            f"this process holds {held:,} of {sum(w.numel() for w in weights):,} weights: of "
            f"{ranks} ranks each has at most {part:,}, the model is not split"
        )


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of every stack in a transformer, in their order."""
    layers: list[torch.nn.Module] = []
    for module in model.modules():
        inside = any(module is part for layer in layers for part in layer.modules())
        if isinstance(module, torch.nn.ModuleList) and not inside:
            layers += module
    return layers


def sharded_sizes(model: torch.nn.Module, parts: int) -> set[int]:
    """Numbers of elements that `share` splits, gathers and reduces, of each weight and together.

    parts: among how many ranks the first dimension of every weight is divided, up to a whole row.
    """
    sizes: set[int] = set()
    seen: set[torch.nn.Parameter] = set()
    for module in [*layers_of(model), model]:
        weights = [weight for weight in module.parameters() if weight not in seen]
        seen.update(weights)
        for some in weights, [weight for weight in weights if weight.requires_grad]:
            rows = [-(len(weight) // -parts) for weight in some]
            sizes |= {*rows, sum(n * w[:1].numel() for n, w in zip(rows, some, strict=True))}
    return sizes
