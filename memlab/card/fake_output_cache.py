"""A cache of operators' output metadata, so that PyTorch infers each kind of call only once.

A call is looked up by its operator, the metadata of its tensor arguments (shape, strides, storage
offset, dtype) and its other arguments. Only operators that create new tensors take part: no views,
no in-place operators, no output shape that follows from values. PyTorch's own cache of fake results
checks more of every argument than a simulation needs, and takes three times as long to answer.
"""

import contextlib
import functools
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

NAMESPACES = {"aten", "prims", "bitsandbytes"}  # other packages' operators may depend on state
PLAIN = {torch.dtype, torch.device, torch.layout, torch.memory_format, str, type(None)}
NUMBERS = {bool, int, float}
HOST = torch.device("cpu")  # to PyTorch, the device of every fake tensor


class TensorMeta(NamedTuple):
    """The metadata by which an argument enters the key of a call, and by which a result is made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype


class FakeOutputCache:
    """Output metadata of operators, by the metadata of their arguments.

    mode: the FakeTensorMode to which the tensors belong.
    """

    def __init__(self, mode):
        self._mode = mode
        # Key of a call -> (whether it returns several tensors, their metadata)
        self._kinds: dict[tuple, tuple[bool, list[TensorMeta]]] = {}

    def run(self, func, args, kwargs, make):
        """The result of a call: new tensors from cached metadata, or else what `make()` returns."""
        if not _only_makes(func):
            return make()
        try:
            # true_divide of integers returns the default dtype. Tensors of inference mode differ.
            around = func, torch.get_default_dtype(), torch.is_inference_mode_enabled()
            key = *around, _described((args, *kwargs.items()), self._mode)
        except _NotPlain:
            return make()
        if key in self._kinds:
            several, kinds = self._kinds[key]
            made = [_made(kind, self._mode) for kind in kinds]
            return tuple(made) if several else made[0]
        result = make()
        several = isinstance(result, (tuple, list))
        results = result if several else (result,)
        with contextlib.suppress(_NotPlain):  # a result that metadata cannot describe: no entry
            kinds = [_described(result, self._mode) for result in results]
            if all(map(functools.partial(_is_all_of, self._mode), kinds, results)):
                self._kinds[key] = several, kinds
        return result


@functools.cache
def _only_makes(func) -> bool:
    """Whether an operator only creates new tensors, whose metadata follow from its arguments."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in NAMESPACES:
        return False
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    returns = func._schema.returns
    return (
        not func._schema.is_mutable
        and not tags & set(func.tags)
        and bool(returns)
        # alias_info: the output is a view of an argument, or the argument itself.
        and all(str(value.type) == "Tensor" and value.alias_info is None for value in returns)
    )


class _NotPlain(Exception):
    """A value that a key cannot describe."""


def _described(value, mode):
    """The part of a key that stands for an argument. Raises _NotPlain if none describes it."""
    if isinstance(value, FakeTensor):
        plain = (
            value.constant is None  # PyTorch computes with the values of small constants
            and value.fake_device == HOST
            and value.fake_mode is mode
            and value.layout is torch.strided
            and not value.dtype.is_complex
            and not value.is_neg()
        )
        if plain:
            return TensorMeta(value.shape, value.stride(), value.storage_offset(), value.dtype)
    elif type(value) in PLAIN:
        return value
    elif type(value) in NUMBERS:
        return type(value), value  # 1 == 1.0 == True, but the dtypes of the results differ
    elif isinstance(value, (list, tuple)):
        return tuple([_described(item, mode) for item in value])
    raise _NotPlain


def _is_all_of(mode, kind, result) -> bool:
    """Whether metadata describe a result completely, with a storage of the same bytes."""
    if type(kind) is not TensorMeta or kind.offset:
        return False
    return _made(kind, mode).untyped_storage().nbytes() == result.untyped_storage().nbytes()


def _made(kind: TensorMeta, mode) -> FakeTensor:
    with no_dispatch():
        on_meta = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device="meta")
    return FakeTensor(mode, on_meta, HOST)
