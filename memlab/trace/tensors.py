"""What a tensor is made of, where it lies, and who else holds it."""

import functools
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type


@functools.cache
def is_wrapper_subclass(kind: type) -> bool:
    """Whether tensors of a class are made of others, as DTensor is of this rank's part."""
    return is_traceable_wrapper_subclass_type(kind)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's data: itself, or those that it is made of."""
    if not is_wrapper_subclass(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = (getattr(tensor, name) for name in names)
    inner = [inner_tensors(part) for part in parts if isinstance(part, torch.Tensor)]
    return [part for some in inner for part in some]


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that torch.func's transforms, such as vmap and grad, have wrapped."""
    while not isinstance(tensor, FakeTensor) and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def on_card(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is a simulated card's: every fake one's that is not on the host."""
    tensor = without_transforms(tensor)
    if not isinstance(tensor, FakeTensor):
        return is_wrapper_subclass(type(tensor)) and any(map(on_card, inner_tensors(tensor)))
    return tensor.fake_device.type != "meta" and not is_on_host(tensor.untyped_storage())


def is_on_host(data: torch.UntypedStorage) -> bool:
    """Whether a storage of a fake tensor lies on the host."""
    return hasattr(data, "_memlab_on_host")


def place_on_host(tensor: Any) -> None:
    """From now on a fake tensor's storage, and every view of it, lies on the host."""
    tensor.untyped_storage()._memlab_on_host = True


def is_gathered(data: torch.UntypedStorage) -> bool:
    """Whether a storage holds parameters of all ranks, for as long as a layer needs them."""
    return hasattr(data, "_memlab_gathered")


def tensors_in(values: Iterable) -> list[torch.Tensor]:
    """The tensors among values, and in lists of them."""
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


def sole_summand(args: tuple, out: torch.Tensor, live: Container[int]) -> torch.Tensor | None:
    """The summand whose memory autograd would take for a sum of gradients, None for none.

    Where two paths of the graph meet, autograd adds their gradients. It reuses the first one's
    memory when nobody else holds it, except under a dispatch mode such as the tracer
    (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp). So the log follows what
    happens without the tracer: the sum takes over the storage of the first. live: the storages that
    are counted, by their addresses.
    """
    first, second = args[0], args[1]
    if not isinstance(second, torch.Tensor) or first.shape != second.shape:
        return None
    if first.dtype != out.dtype:
        return None
    storage = first.untyped_storage()
    is_alone = (
        first._use_count() <= SOLE_TENSOR_USES
        and torch._C._storage_Use_Count(storage._cdata) <= SOLE_STORAGE_USES
    )
    return first if storage._cdata in live and is_alone else None


# How many references a gradient has, seen from the dispatch of the addition, when the autograd
# engine alone holds it: the engine's buffer and the dispatcher's copies of the argument.
# tests/trace/test_tracer.py compares the result with the profiler, under which no mode is active.
SOLE_TENSOR_USES = 4
SOLE_STORAGE_USES = 2

# How the derivatives of indexing, gathering, sorting and of a maximum fill zeros: in place, except
# under a dispatch mode (`areAnyTensorSubclassLike`, aten/src/ATen/TensorSubclassLikeUtils.h, which
# `gather_backward`, `index_backward` and `value_selecting_reduction_backward` ask). The log follows
# what happens without the tracer.
FILLS_ZEROS = frozenset(
    (
        torch.ops.aten.index_add.default,
        torch.ops.aten.index_put.default,
        torch.ops.aten.put.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter_add.default,
    )
)
