"""Code written for CUDA on fake cpu tensors: CUDA's names, and moves between host and card."""

import contextlib
import importlib
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from memlab.card import bitsandbytes

# The module: the name torch.optim.optimizer is taken away from the package after its import.
optimizers = importlib.import_module("torch.optim.optimizer")


@contextlib.contextmanager
def cuda_code_on_cpu_tensors(on_host=lambda tensor: False, to_host=lambda tensor: tensor):
    """Let code written for CUDA run on fake tensors, which call themselves cpu tensors.

    on_host: says of a tensor whether it lies on the host, so that a move to the card makes
        a new one. to_host: makes a tensor's copy on the host.
    """
    foreach_devices = mock.Mock(return_value=["cpu"])  # elsewhere the default on CUDA only
    types = [*optimizers._foreach_supported_types, FakeTensor]
    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (torch.autocast, "__init__", _autocast_on_cpu),
            (torch.amp.GradScaler, "__init__", _scaler_on_cpu),
            (torch, "is_autocast_enabled", _is_autocast_enabled),
            (torch, "get_autocast_dtype", _get_autocast_dtype),
            (optimizers, "_get_foreach_kernels_supported_devices", foreach_devices),
            (torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices", foreach_devices),
            (optimizers, "_foreach_supported_types", types),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        stack.enter_context(CudaNames(on_host, to_host))
        yield


@contextlib.contextmanager
def saved_on_host(tracer):
    """Let `torch.autograd.graph.save_on_cpu` move what autograd saves off the card and back.

    Its own hooks would find every tensor on the cpu already and leave it there.
    """

    def init(self, pin_memory=False, device_type="cuda"):
        def pack(tensor):
            return tracer.copy_to_host(tensor, torch.empty if pin_memory else torch.empty_like)

        torch.autograd.graph.saved_tensors_hooks.__init__(self, pack, tracer.copy_to_card)

    with mock.patch.object(torch.autograd.graph.save_on_cpu, "__init__", init):
        yield


MOVES = (torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.pin_memory)


class CudaNames(TorchFunctionMode):
    """Turns every device argument that names the card into the cpu of the fake tensors."""

    def __init__(self, on_host, to_host):
        super().__init__()
        self.on_host, self.to_host = on_host, to_host

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.device, torch._C._nn._parse_to):  # a name alone makes no tensor
            if args and isinstance(args[0], int):
                args = (torch.device("cuda", args[0]), *args[1:])
            return func(*args, **kwargs)
        if func in MOVES:
            return self._moved(func, args, kwargs)
        if isinstance(kwargs.get("device"), int):
            kwargs = kwargs | {"device": torch.device("cuda", kwargs["device"])}
        args = [cpu_for_cuda(v) if isinstance(v, (str, torch.device)) else v for v in args]
        if kwargs:
            kwargs = {name: cpu_for_cuda(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _moved(self, func, args, kwargs):
        """`.cpu()`, `.cuda()`, `.to(...)` and `.pin_memory()`."""
        tensor, *rest = args
        if func is torch.Tensor.pin_memory:
            return tensor
        if func is torch.Tensor.cpu:
            rest, kwargs = ["cpu"], {}
        elif func is torch.Tensor.cuda:
            rest, kwargs = [torch.device("cuda", *rest[:1])] if rest else ["cuda"], {}
        elif rest and isinstance(rest[0], int):
            rest[0] = torch.device("cuda", rest[0])
        named = [*rest, *kwargs.values()]
        here = [cpu_for_cuda(value) for value in rest]
        options = {name: cpu_for_cuda(value) for name, value in kwargs.items()}
        if any(isinstance(value, str) and value == "cpu" for value in named):
            if self.on_host(tensor) or tensor.requires_grad:  # a graph goes on where it is
                return torch.Tensor.to(tensor, *here, **options)
            return torch.Tensor.to(self.to_host(tensor), *here, **options)
        # What fake tensors call their device is the card: `.to(model.device)` goes there, too.
        to_card = any(
            isinstance(value, torch.device) or cpu_for_cuda(value) is not value for value in named
        )
        if to_card and bitsandbytes.is_to_be(tensor):
            if self.on_host(tensor):
                tensor.data = torch.empty(tensor.shape, dtype=bitsandbytes.source_dtype(tensor))
            bitsandbytes.quantize(tensor, tensor.device)
            return tensor
        if to_card and self.on_host(tensor):
            dtypes = [value for value in named if isinstance(value, torch.dtype)]
            moved = torch.empty(tensor.shape, dtype=dtypes[0] if dtypes else tensor.dtype)
            if not isinstance(tensor, FakeTensor):
                moved._memlab_data = tensor
            return moved
        return torch.Tensor.to(tensor, *here, **options)


def cpu_for_cuda(value):
    """A device or its name, with the cpu of the fake tensors for the card."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        value = torch.device(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        if value.index:
            raise ValueError(
                f"device is {str(value)!r}: the simulated card is cuda:0, and there is one"
            )
        return torch.device("cpu")
    return value


_original_autocast_init = torch.autocast.__init__
_original_scaler_init = torch.amp.GradScaler.__init__
_original_is_autocast_enabled = torch.is_autocast_enabled
_original_get_autocast_dtype = torch.get_autocast_dtype


def _is_autocast_enabled(device_type="cuda"):  # CUDA's, where none is named
    return _original_is_autocast_enabled(device_type.replace("cuda", "cpu"))


def _get_autocast_dtype(device_type):
    return _original_get_autocast_dtype(device_type.replace("cuda", "cpu"))


def _autocast_on_cpu(self, device_type, dtype=None, enabled=True, cache_enabled=None):
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.float16  # CUDA's default
    _original_autocast_init(self, device_type, dtype, enabled, cache_enabled)


def _scaler_on_cpu(self, device="cuda", *args, **kwargs):
    _original_scaler_init(self, cpu_for_cuda(device), *args, **kwargs)
