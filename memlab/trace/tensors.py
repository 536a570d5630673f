"""Questions about a tensor: its inner tensors, its device, and whether autograd may reuse it.

A fake tensor is on the simulated GPU unless its storage is marked as being on the host. The mark
is on the storage so that all views share it.
"""

import functools
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type


@functools.cache
def is_wrapper_subclass(kind: type) -> bool:
    """Whether tensors of a class wrap other tensors, as a DTensor wraps the local shard."""
    return is_traceable_wrapper_subclass_type(kind)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's data: itself, or those that it wraps, at any depth."""
    if not is_wrapper_subclass(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = (getattr(tensor, name) for name in names)
    inner = [inner_tensors(part) for part in parts if isinstance(part, torch.Tensor)]
    return [part for some in inner for part in some]


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of torch.func's transforms, such as vmap and grad."""
    while not isinstance(tensor, FakeTensor) and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def on_card(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the simulated GPU: it is fake, and not marked as being on the host.

    Tensors on the meta device are on neither.
    """
    tensor = without_transforms(tensor)
    if not isinstance(tensor, FakeTensor):
        return is_wrapper_subclass(type(tensor)) and any(map(on_card, inner_tensors(tensor)))
    return tensor.fake_device.type != "meta" and not is_on_host(tensor.untyped_storage())


def is_on_host(data: torch.UntypedStorage) -> bool:
    """Whether the storage of a fake tensor is marked as being on the host."""
    return hasattr(data, "_memlab_on_host")


def place_on_host(tensor: Any) -> None:
    """Mark the storage of a fake tensor, and so every view of it, as being on the host."""
    tensor.untyped_storage()._memlab_on_host = True


def is_gathered(data: torch.UntypedStorage) -> bool:
    """Whether a storage holds parameters that FSDP has gathered from all ranks for a layer."""
    return hasattr(data, "_memlab_gathered")


def tensors_in(values: Iterable) -> list[torch.Tensor]:
    """The tensors among values, and in nested lists and tuples of them."""
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


def sole_summand(args: tuple, out: torch.Tensor, live: Container[int]) -> torch.Tensor | None:
    """The summand whose storage autograd would reuse for a sum of gradients, or None.

    Where two paths of the graph meet, autograd adds their gradients. It adds in place, into the
    first one, if nothing else refers to that tensor. Under a dispatch mode, such as the tracer's,
    it never does (`accumulate` and `can_accumulate_inplace` in
    torch/csrc/autograd/input_buffer.cpp). The log follows what happens without the tracer: the sum
    takes over the first one's storage. live: the counted storages, by `_cdata`.
    """
    first, second = args[0], args[1]
    if not isinstance(second, torch.Tensor) or first.shape != second.shape:
        return None
    if first.dtype != out.dtype:
        return None
    storage = first.untyped_storage()
    # The storage must be unshared, too: if the gradient is a view, its base may hold the storage.
    is_alone = (
        first._use_count() <= SOLE_TENSOR_USES
        and torch._C._storage_Use_Count(storage._cdata) <= SOLE_STORAGE_USES
    )
    return first if storage._cdata in live and is_alone else None


# References to a gradient that only the autograd engine holds, while the addition is dispatched.
# They come from the engine's buffer and from the dispatcher's copies of the argument.
# tests/trace/test_tracer.py compares the resulting peaks with PyTorch's profiler, under which no
# mode is active.
SOLE_TENSOR_USES = 4
SOLE_STORAGE_USES = 2

# The backward passes of indexing, gathering, sorting and of a maximum write into zeros with these
# operators. They do so in place, except under a dispatch mode: `gather_backward`,
# `index_backward` and `value_selecting_reduction_backward` ask `areAnyTensorSubclassLike`
# (aten/src/ATen/TensorSubclassLikeUtils.h). The log follows what happens without the tracer.
FILLS_ZEROS = frozenset(
    (
        torch.ops.aten.index_add.default,
        torch.ops.aten.index_put.default,
        torch.ops.aten.put.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter_add.default,
    )
)
