"""What operators were found to give, so that PyTorch works out each kind of call once.

PyTorch's own cache of fake results asks more of every argument than a simulation needs, and takes
three times as long to answer.
"""

import contextlib
import functools
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

NAMESPACES = {"aten", "prims", "bitsandbytes"}  # what others do may depend on their state
PLAIN = {torch.dtype, torch.device, torch.layout, torch.memory_format, str, type(None)}
NUMBERS = {bool, int, float}
HOST = torch.device("cpu")  # what PyTorch takes every fake tensor for


class TensorMeta(NamedTuple):
    """What a call depends on, of a tensor that it is given, and what is known of one it makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype


class FakeOutputCache:
    """The kinds of tensors that operators make of what they are given.

    mode: the FakeTensorMode whose tensors these are.
    """

    def __init__(self, mode):
        self._mode = mode
        # What decides the result of a call -> whether it is several tensors, and their kinds.
        self._kinds: dict[tuple, tuple[bool, list[TensorMeta]]] = {}

    def run(self, func, args, kwargs, make):
        """What a call gives: tensors such as it was found to make, else what `make` makes."""
        if not _only_makes(func):
            return make()
        try:
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
        with contextlib.suppress(_NotPlain):
            kinds = [_described(result, self._mode) for result in results]
            if all(map(functools.partial(_is_all_of, self._mode), kinds, results)):
                self._kinds[key] = several, kinds
        return result


@functools.cache
def _only_makes(func) -> bool:
    """Whether an operator makes tensors, of kinds that follow from those that it is given."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in NAMESPACES:
        return False
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    returns = func._schema.returns
    return (
        not func._schema.is_mutable
        and not tags & set(func.tags)
        and bool(returns)
        and all(str(value.type) == "Tensor" and value.alias_info is None for value in returns)
    )


class _NotPlain(Exception):
    """A value is more than a kind or a number."""


def _described(value, mode):
    """What a call depends on of an argument; raises _NotPlain where that is more than a kind."""
    if isinstance(value, FakeTensor):
        plain = (
            value.constant is None
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
        return type(value), value  # 1 and 1.0 and True are equal, and give other dtypes
    elif isinstance(value, (list, tuple)):
        return tuple([_described(item, mode) for item in value])
    raise _NotPlain


def _is_all_of(mode, kind, result) -> bool:
    """Whether a kind says everything of a result, its memory too."""
    if type(kind) is not TensorMeta or kind.offset:
        return False
    return _made(kind, mode).untyped_storage().nbytes() == result.untyped_storage().nbytes()


def _made(kind: TensorMeta, mode) -> FakeTensor:
    with no_dispatch():
        on_meta = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device="meta")
    return FakeTensor(mode, on_meta, HOST)
