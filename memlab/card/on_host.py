"""The host of a simulated card: what runs there, or comes there, with data where it is small."""

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from memlab.card import dynamic_shapes, known_values
from memlab.card.kernels.taken import KernelMemory
from memlab.card.placement import NotSimulated, fake_like, mark_owned, without_data
from memlab.trace.tensors import on_card, place_on_host, tensors_in
from memlab.trace.work import TRIFLE
from memlab.units import mib

aten = torch.ops.aten
SMALL = 2**20  # bytes up to which numbers on the host hold data
ORDINARY = 2**28  # the same for integers and booleans
NO_DATA_ON_THE_HOST = (
    f"what it gives depends on values of a tensor on the host that has none here, because it takes "
    f"more than {mib(SMALL)}. Do it in smaller parts, or before the card is entered"
)


class Host:
    """Runs what is on the host, and copies from the card.

    mode: a `memlab.card.card_mode.CardMode`.
    """

    def __init__(self, mode, kernels: KernelMemory):
        self._fake, self._tracer, self._work = mode.fake, mode.tracer, mode.work
        self._reader, self._kernels = mode.reader, kernels

    def run(self, func, args, kwargs, tensors):
        """What an operation gives whose result lies on the host."""
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            # What a factory makes has data if it is small; what is made of data has some.
            result = None if tensors else func(*args, **kwargs)
            if isinstance(result, FakeTensor) and not holds_data(result):
                place_on_host(result)
                return result
            with no_dispatch():
                result = func(*args, **kwargs)
            if not tensors and isinstance(result, torch.Tensor):
                mark_owned(result)
            return result
        if func is aten._local_scalar_dense.default:
            return self._reader.item(args[0])
        if func in (aten.equal.default, aten.allclose.default):
            return self._reader.compare(func, args, kwargs)
        if func is aten._to_copy.default and on_card(args[0]):
            return self._copy(args[0], kwargs.get("dtype"))
        here, options = without_data(self._fake, args, kwargs, tensors)
        try:
            result = func(*here, **options)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise NotSimulated(f"{func} is not simulated: {NO_DATA_ON_THE_HOST}") from None
        if any(map(on_card, tensors)) and all(map(holds_data, tensors_in([result]))):
            here = tree_map_only(FakeTensor, self._reader.host_copy, (args, kwargs))
            with no_dispatch():
                return func(*here[0], **here[1])
        if result is None:  # lists of tensors, changed in place
            return None
        if func._schema.is_mutable and not isinstance(args[0], FakeTensor):
            return args[0]  # its numbers stay what they were
        known_values.propagate(func, args, kwargs, result)
        for tensor in tensors_in([result]):
            if tensor.device.type != "meta":
                place_on_host(tensor)
        return result

    def _copy(self, tensor, dtype):
        """A copy on the host of a tensor on the card: with data if it is small.

        Where strides differ, a copy in the right order is made on the card first
        (`copy_requires_temporaries` in aten/src/ATen/native/cuda/Copy.cu).
        """
        copy = aten.empty_like.default(fake_like(self._fake, tensor), dtype=dtype)
        place_on_host(copy)
        if copy.stride() != tensor.stride():
            self._kernels.take_and_give_back(tensor.nbytes)
        self._carry(tensor.nbytes)
        if holds_data(copy):
            data = self._reader.host_copy(tensor)
            with no_dispatch():
                copy = data.to(copy.dtype)
        return copy

    def write(self, target, source):
        """`target.copy_(source)` from the card into a tensor of the host."""
        if target.stride() != source.stride():
            self._kernels.take_and_give_back(source.nbytes)
        self._carry(source.nbytes)
        if not isinstance(target, FakeTensor):
            copy = self._reader.host_copy(source)
            with no_dispatch():
                target.copy_(copy)
        return target

    def _carry(self, nbytes: int) -> None:
        """What is small is a value that somebody reads; the host's waits are counted elsewhere."""
        if nbytes >= TRIFLE:
            self._work.note_copy(nbytes, self._tracer.phase())

    def zeros(self, shape, dtype, device):
        """Zeros that the card never holds, without data: paged states."""
        if "paged states" not in self._kernels.rules:
            return torch.zeros(shape, dtype=dtype, device=device)
        with _disable_current_modes():  # or they would be the card's
            meta = torch.empty(shape, dtype=dtype, device="meta")
            return fake_like(self._fake, meta, on_host=True)


def holds_data(tensor) -> bool:
    """Whether a tensor of this size and dtype is an ordinary one on the host."""
    return tensor.nbytes <= (SMALL if tensor.is_floating_point() else ORDINARY)


MAY_MIX = {"copy_", "_to_copy", "set_", *dynamic_shapes.BY_MASK}  # where CUDA takes tensors of both


def refuse_two_devices(func, tensors) -> None:
    """Raise CUDA's own error where a tensor of the host meets one of the card.

    Raises NotSimulated where one of a real card does.
    """
    for tensor in tensors:
        if not isinstance(tensor, FakeTensor) and tensor.is_cuda:
            raise NotSimulated(
                f"a tensor on a real card, of shape {list(tensor.shape)}, meets a SimulatedGPU: "
                "make it inside, or take its .cpu()"
            )
    if len(tensors) < 2 or func.namespace != "aten" or func._opname in MAY_MIX:
        return
    if func._opname.startswith(("_foreach", "_pack_padded", "_ctc_loss", "ctc_loss")):
        return
    for tensor in tensors:
        if not on_card(tensor) and tensor.dim() and tensor.numel() and not tensor.is_meta:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! (in {func})"
            )
