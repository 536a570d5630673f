"""The host of the simulated GPU: operations on host tensors, and copies from the GPU.

Host tensors have data if they are small, so samplers, tokenizers and collators work. Larger ones,
such as weights, are fake tensors that are marked as host memory. Nothing here counts as GPU memory,
except the contiguous copy that CUDA makes of a tensor before it leaves the GPU.
"""

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
SMALL = 2**20  # bytes up to which floating-point tensors on the host hold data: 1 MiB
ORDINARY = 2**28  # the same for integers and booleans: 256 MiB
NO_DATA_ON_THE_HOST = (
    f"its result depends on the values of a host tensor that has none here, because it takes more "
    f"than {mib(SMALL)}. Compute it in smaller parts, or before the SimulatedGPU is entered"
)


class Host:
    """Runs operations on the host, and copies from the GPU to the host.

    mode: a `memlab.card.card_mode.CardMode`.
    kernels: the memory that kernels allocate for themselves.
    """

    def __init__(self, mode, kernels: KernelMemory):
        self._fake, self._tracer, self._work = mode.fake, mode.tracer, mode.work
        self._reader, self._kernels = mode.reader, kernels

    def run(self, func, args, kwargs, tensors):
        """The result of an operation that lies on the host.

        tensors: the tensors among its arguments.
        """
        if kwargs.get("pin_memory"):  # a CPU build cannot pin: `placement.pin` marks the tensor
            kwargs = kwargs | {"pin_memory": False}
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            # Without tensors it is a factory function. A fake run tells how large its result is.
            # An operation on tensors with data always gets data.
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
            return self._copy(args[0], kwargs.get("dtype"), kwargs.get("memory_format"))
        here, options = without_data(self._fake, args, kwargs, tensors)
        try:
            result = func(*here, **options)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise NotSimulated(f"{func} is not simulated: {NO_DATA_ON_THE_HOST}") from None
        # A small host tensor made from GPU tensors, as by zeros_like(x, device="cpu"): with data.
        if any(map(on_card, tensors)) and all(map(holds_data, tensors_in([result]))):
            here = tree_map_only(FakeTensor, self._reader.host_copy, (args, kwargs))
            with no_dispatch():
                return func(*here[0], **here[1])
        if result is None:  # a multi-tensor operator in place
            return None
        if func._schema.is_mutable and not isinstance(args[0], FakeTensor):
            return args[0]  # unknown values written into a tensor with data: it keeps its values
        known_values.propagate(func, args, kwargs, result)
        for tensor in tensors_in([result]):
            if tensor.device.type != "meta":
                place_on_host(tensor)
        return result

    def _copy(self, tensor, dtype, memory_format):
        """A copy on the host of a GPU tensor, with data if it is small."""
        like = fake_like(self._fake, tensor)
        copy = aten.empty_like.default(like, dtype=dtype, memory_format=memory_format)
        place_on_host(copy)
        self._leave(tensor, copy)
        if holds_data(copy):
            strides, data = copy.stride(), self._reader.host_copy(tensor)
            with no_dispatch():
                data = data.to(copy.dtype)  # copies nothing if the dtype is the same
                if data.stride() != strides:
                    data = torch.empty_strided(data.shape, strides, dtype=data.dtype).copy_(data)
            mark_owned(data)  # its values are stand-ins, which must not pass for data from outside
            return data
        return copy

    def write(self, target, source):
        """`target.copy_(source)` from the GPU into a host tensor."""
        self._leave(source, target)
        if not isinstance(target, FakeTensor):  # it has data: the known values, or stand-ins
            copy = self._reader.host_copy(source)
            with no_dispatch():
                target.copy_(copy)
        return target

    def _leave(self, source, target) -> None:
        """Allocate what CUDA takes on the GPU to copy `source` into `target` on the host.

        aten/src/ATen/native/cuda/Copy.cu, `copy_kernel_cuda`: if strides or dtypes differ
        (`copy_requires_temporaries`), the source is first made contiguous there.

        NB: with `non_blocking` CUDA also converts the dtype on the GPU first. That copy is not
        simulated.
        """
        expands = source.shape != target.shape
        alike = source.stride() == target.stride() and source.dtype == target.dtype
        if expands or not (alike or source.is_contiguous()):
            self._kernels.take_and_give_back(target.numel() * source.itemsize)
        self._carry(source.nbytes)

    def _carry(self, nbytes: int) -> None:
        """Count a copy to the host in the step's work, unless it is smaller than `TRIFLE`.

        Such a copy is a value that code reads. The time that the host waits for it is counted
        elsewhere.
        """
        if nbytes >= TRIFLE:
            self._work.note_copy(nbytes, self._tracer.phase())

    def zeros(self, shape, dtype, device):
        """Zeros in the host's memory, without data: the states of a paged optimizer.

        Without the rule "paged states" they are ordinary zeros on `device`.
        """
        if "paged states" not in self._kernels.rules:
            return torch.zeros(shape, dtype=dtype, device=device)
        with _disable_current_modes():  # under the modes, they would be allocated on the GPU
            meta = torch.empty(shape, dtype=dtype, device="meta")
            return fake_like(self._fake, meta, on_host=True)


def holds_data(tensor) -> bool:
    """Whether a tensor of this size and dtype has data when it lies on the host."""
    return tensor.nbytes <= (SMALL if tensor.is_floating_point() else ORDINARY)


# Operators that CUDA lets mix tensors of both places: a GPU tensor may have host indices.
MAY_MIX = {"copy_", "_to_copy", "set_", *dynamic_shapes.BY_MASK}


def refuse_two_devices(func, tensors) -> None:
    """Raise CUDA's own RuntimeError if host and GPU tensors meet in an operation.

    Raises NotSimulated for a tensor on a real GPU.
    """
    for tensor in tensors:
        if not isinstance(tensor, FakeTensor) and tensor.is_cuda:
            raise NotSimulated(
                f"a tensor on a real card, of shape {list(tensor.shape)}, meets a SimulatedGPU: "
                "make it inside, or take its .cpu()"
            )
    if len(tensors) < 2 or func.namespace != "aten" or func._opname in MAY_MIX:
        return
    # Multi-tensor operators then run tensor by tensor. Lengths of sequences may be host tensors.
    if func._opname.startswith(("_foreach", "_pack_padded", "_ctc_loss", "ctc_loss")):
        return
    for tensor in tensors:
        # CUDA kernels take a 0-dim host tensor as a number.
        if not on_card(tensor) and tensor.dim() and tensor.numel() and not tensor.is_meta:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! (in {func})"
            )
