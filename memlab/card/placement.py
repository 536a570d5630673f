"""Where a tensor lies, on the GPU or on the host, and what it answers when Python code asks.

On the host, small tensors and integers are ordinary tensors with data. Larger ones, such as
weights, are fake tensors whose storage carries a mark. A fake tensor without the mark lies on the
GPU, unless its device is meta. PyTorch takes all of them for CPU tensors, so its CPU kernels supply
the shapes. This module patches FakeTensor so that `.device`, `.is_cuda` and the like answer as on
a machine with a GPU.

Why not PyTorch's own fake tensors on `cuda`? Without a GPU, autograd refuses them. CPU builds have
no CUDA device guard and no accelerator, and CUDA builds ask the driver
(torch/csrc/autograd/engine.cpp, `GraphTask::stash_current_streams`). A compiled extension that
overwrites a C++ object of PyTorch can answer in both cases. With PyTorch 2.11 to 2.14 it gave the
same events. But every user would need a compiler, and in a CUDA build the timer of
DistributedDataParallel still asks the driver. Nearly all patches of this module would stay.
"""

import contextlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from memlab.trace.patches import replaced
from memlab.trace.tensors import (
    inner_tensors,
    is_wrapper_subclass,
    on_card,
    place_on_host,
    without_transforms,
)


class NotSimulated(ValueError):
    """Raised for code that is not simulated; the message says what to do instead."""


ONE_CARD = "the only simulated card is cuda:0"
CARD, HOST, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")


@contextlib.contextmanager
def with_data():
    """Disable all modes: tensors created in the block are ordinary tensors with data."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def fake_like(mode, tensor, on_host=False) -> FakeTensor:
    """A new fake tensor of `mode` with the shape, the strides and the dtype of `tensor`."""
    with no_dispatch():
        shape, strides = tensor.shape, tensor.stride()
        meta = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
        fake = FakeTensor(mode, meta, torch.device("cpu"))  # to PyTorch, for GPU tensors too
    if on_host:
        place_on_host(fake)
    return fake


def without_data(mode, args, kwargs, tensors):
    """The arguments, with a fake host tensor in place of each tensor that has data."""
    if all(type(tensor) is FakeTensor for tensor in tensors):  # most operations: skip the tree map
        return args, kwargs

    def fake(tensor):
        if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:  # sparse: no strides
            return tensor
        return fake_like(mode, tensor, on_host=True)

    return tree_map_only(torch.Tensor, fake, (args, kwargs))


def pin(tensor):
    """Mark a host tensor as pinned, in place. Raises CUDA's RuntimeError for a GPU tensor."""
    if on_card(tensor):
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    tensor.untyped_storage()._memlab_pinned = True
    return tensor


def is_pinned(tensor) -> bool:
    """Whether a tensor lies in pinned host memory."""
    return hasattr(tensor.untyped_storage(), "_memlab_pinned")


def mark_owned(tensor) -> None:
    """Mark a real tensor as created inside the simulation."""
    tensor.untyped_storage()._memlab_inside = True


def predates_context(tensor: torch.Tensor) -> bool:
    """Whether a tensor has data and was created before the simulation was entered."""
    if is_wrapper_subclass(type(tensor)):
        return all(map(predates_context, inner_tensors(tensor)))
    return not (
        isinstance(tensor, FakeTensor) or hasattr(tensor.untyped_storage(), "_memlab_inside")
    )


def device_of(tensor: torch.Tensor) -> torch.device:
    """The value of `tensor.device` on a machine with the GPU: cuda:0, cpu or meta."""
    tensor = without_transforms(tensor)
    if is_wrapper_subclass(type(tensor)):
        return device_of(inner_tensors(tensor)[0])
    if not isinstance(tensor, FakeTensor):
        return HOST if tensor.device.type == "cpu" else tensor.device
    if tensor.fake_device.type == "meta":
        return META
    return CARD if on_card(tensor) else HOST


def address_of(tensor) -> int:
    """A number in place of a storage's address: equal for its views, unique among live storages."""
    return tensor.untyped_storage()._cdata


def is_cuda_device(value) -> bool:
    """Whether a device, a device name or a GPU index is the simulated GPU.

    Raises NotSimulated for any GPU but the first, and for a device other than cuda, cpu and meta.
    """
    device = torch.device(value) if isinstance(value, str) else value
    if isinstance(value, int):
        device = torch.device("cuda", value)
    if not isinstance(device, torch.device) or device.type in ("cpu", "meta"):
        return False
    if device.type != "cuda" or device.index:
        raise NotSimulated(f"device is {str(device)!r}: {ONE_CARD}")
    return True


def names_host(value) -> bool:
    """Whether a device, or its name, is the CPU."""
    if isinstance(value, str):
        return value.partition(":")[0] == "cpu"
    return isinstance(value, torch.device) and value.type == "cpu"


_make = FakeTensor.__new__


def _new(cls, *args, requires_grad=None, **kwargs):
    """Let libraries copy parameters by `type(p)(data, requires_grad=..., **p.__dict__)`."""
    if args and isinstance(args[0], torch.Tensor):  # FakeTensor itself expects its mode first
        return torch.nn.Parameter(args[0], requires_grad)
    return _make(cls, *args, **kwargs)


NO_ARRAY = (  # PyTorch's own message
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
    "memory first."
)


# The attributes by which Python code asks where a tensor lies, for fake tensors and for classes
# made of them, such as DTensor.
PLACE = {
    "device": property(device_of),
    "is_cuda": property(on_card),
    "is_cpu": property(lambda self: device_of(self) == HOST),
    "get_device": lambda self: 0 if on_card(self) else -1,
}


@contextlib.contextmanager
def tensors_name_their_place(host_copy):
    """Let fake tensors answer Python code as tensors of a GPU and of its host do.

    host_copy: a function that returns an ordinary tensor with the values of a fake one.
    """

    def device(self):
        mode = self.fake_mode
        if mode.in_kernel_invocation:  # as FakeTensor.device: the meta kernel expects meta tensors
            return META
        # While PyTorch infers a result, its code must see the one device that all tensors share.
        return self.fake_device if mode.dispatching else device_of(self)

    def numpy(self, *, force=False):
        if on_card(self) and not force:
            raise TypeError(NO_ARRAY)
        return host_copy(self).numpy()

    def refuse_dlpack(self, **settings):
        raise NotSimulated(
            "DLPack is not simulated: there is no memory to share. Give the other library a numpy "
            "array, by .cpu().numpy()"
        )

    def as_text(self, spec):
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def represent(self, *, tensor_contents=None):
        # A scalar reads as its value or its stand-in. Inside a kernel nothing can be read.
        readable = self.dim() == 0 and not self.fake_mode.in_kernel_invocation
        shown = f"{self.item()}" if readable else "..."
        place = f", device='{self.device}'" if on_card(self) else ""
        size = "" if self.dim() == 0 else f", size={tuple(self.shape)}"
        dtype = "" if self.dtype in (torch.float32, torch.int64, torch.bool) else f", {self.dtype}"
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        text = f"tensor({shown}{size}{place}{dtype}{grad})"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def deep_copy(self, memo):
        if not isinstance(self, torch.nn.Parameter):
            return torch.Tensor.__deepcopy__(self, memo)
        if id(self) not in memo:  # without the gradient, as `torch.nn.Parameter.__deepcopy__`
            copy = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad)
        return memo[id(self)]

    def kind(self, *asked, **options):
        if asked or options:
            return torch.Tensor.type(self, *asked, **options)
        name = torch.empty(0, dtype=self.dtype).type()  # "torch.FloatTensor"
        return name.replace("torch.", "torch.cuda.") if on_card(self) else name

    answers = PLACE | {
        "__new__": staticmethod(_new),
        "device": property(device),
        "data_ptr": lambda self: address_of(self) + self.storage_offset() * self.itemsize,
        "numpy": numpy,
        "__deepcopy__": deep_copy,
        "__dlpack__": refuse_dlpack,
        "tolist": lambda self: host_copy(self).tolist(),
        "type": kind,
        "share_memory_": lambda self: self,  # a no-op for CUDA tensors too
        "__format__": as_text,
        "__repr__": represent,
    }
    rows = [(FakeTensor, name, answer) for name, answer in answers.items()]
    with replaced(*rows, create=True), _wrappers_name_their_place():
        yield


@contextlib.contextmanager
def _wrappers_name_their_place():
    """Make tensors of wrapper subclasses CPU tensors to PyTorch, as their inner tensors are.

    PyTorch would otherwise look for a GPU. From its first GPU tensor on, such a class answers
    `.device` and the like by its inner tensors.
    """
    answering: set[type] = set()
    make: Any = torch.Tensor._make_wrapper_subclass
    with contextlib.ExitStack() as stack:

        def made(cls, *args, device=None, **kwargs):
            if device is not None and torch.device(device).type == "cuda":
                device = HOST
                if cls not in answering:
                    answering.add(cls)
                    rows = [(cls, name, answer) for name, answer in PLACE.items()]
                    stack.enter_context(replaced(*rows, create=True))
            return make(cls, *args, device=device, **kwargs)

        stack.enter_context(replaced((torch.Tensor, "_make_wrapper_subclass", staticmethod(made))))
        yield
