"""Training loops on tensors without data, and CUDA's names for a machine without CUDA."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader
from torch.utils.data._utils import pin_memory, worker
from transformers import core_model_loading, masking_utils

from memlab import quantized

# The module: the name torch.optim.optimizer is taken away from the package after its import.
optimizers = importlib.import_module("torch.optim.optimizer")


@contextlib.contextmanager
def tensors_without_data(moved=lambda parameter: None):
    """Make every tensor a fake one: with a shape, a dtype and a lifetime, but no data.

    moved: called with each parameter of a module that `.to()` and its like have gone through.

    What a training loop asks of values is answered: `.item()` gives 1, the gradient scaler
    always steps. What branches on values in another way raises PyTorch's own error.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(NoData(allow_non_fake_inputs=True))
        stack.enter_context(quantized.weights_without_data())
        for target, name, replacement in (
            (torch.nn.Module, "_apply", _apply_and_tell(moved)),
            (torch.amp.GradScaler, "_maybe_opt_step", _always_step),
            # transformers takes a fake tensor for tracing and then builds masks that a run
            # never builds.
            (masking_utils, "is_tracing", lambda *a, **k: False),
            (masking_utils, "find_packed_sequence_indices", _packed_sequences),
            (worker, "_worker_loop", _with_data(worker._worker_loop)),
            (dataloader._MultiProcessingDataLoaderIter, "_try_get_data", _batch_of_a_worker),
            (pin_memory, "pin_memory", lambda data, *a, **k: data),  # in a thread of its own
            *((masking_utils, name, _only_without_mask(name)) for name in MASK_SKIPS),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        # It reads weights in threads, which no mode follows.
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        load = mock.patch.object(core_model_loading, "_materialize_copy", _weight_of_a_file)
        stack.enter_context(load)
        if "bitsandbytes" in sys.modules:
            functional = sys.modules["bitsandbytes.functional"]
            create = _with_data(functional.create_dynamic_map)
            stack.enter_context(mock.patch.object(functional, "create_dynamic_map", create))
            stack.enter_context(mock.patch.dict(functional.name2qmap, clear=True))  # a cache
        yield


_original_find_packed = masking_utils.find_packed_sequence_indices
_original_try_get_data = dataloader._MultiProcessingDataLoaderIter._try_get_data


def _packed_sequences(position_ids):
    """Which sequence each token belongs to, where the positions came from a tensor with data.

    Positions without data count as those of one sequence a row.
    """
    data = getattr(position_ids, "_memlab_data", None)
    if data is None or _with_data(_original_find_packed)(data) is None:
        return None
    with mock.patch.object(masking_utils, "is_tracing", lambda *a, **k: True):
        return _original_find_packed(position_ids)


def _batch_of_a_worker(*args, **kwargs):
    """A DataLoader's workers make tensors with data, on the host."""
    return _with_data(_original_try_get_data)(*args, **kwargs)


# Where transformers asks whether a mask hides anything at all, and drops it if not.
MASK_SKIPS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


def _only_without_mask(name):
    """A padding mask without data counts as one that hides something: that is what it is for."""
    original = getattr(masking_utils, name)

    def ignore(padding_mask, *args, **kwargs):
        return padding_mask is None and original(padding_mask, *args, **kwargs)

    return ignore


aten = torch.ops.aten
VIEWS = {  # operators that make a view of their first argument: the kernel that does so
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.view.default),
    aten.detach.default: aten.alias.default,
    aten.t.default: aten.t.default,
    aten.transpose.int: aten.transpose.int,
    aten.expand.default: aten.expand.default,
    aten.slice.Tensor: aten.slice.Tensor,
    aten.select.int: aten.select.int,
    aten.unsqueeze.default: aten.unsqueeze.default,
}


class NoData(FakeTensorMode):
    """PyTorch's fake tensors, which refuse to be read, with an answer to `.item()`."""

    avoid_device_init = True  # also while `torch.cuda.is_available()` says yes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard against torch.compile around every operation, as in `memlab.tracer`."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        # Where the answer is plain, PyTorch's search for it, by all arguments, takes the most of a
        # simulation's time.
        if isinstance(func, torch._ops.OpOverload) and not func._schema.returns:
            return None  # it writes into its arguments: the lists of multi-tensor optimizers
        first = args[0] if args else None
        if func in VIEWS and isinstance(first, FakeTensor) and first.constant is None:
            with in_kernel_invocation_manager(self):
                view = VIEWS[func](*args, **kwargs)
            return FakeTensor(self, view, first.fake_device)
        if func is aten.lift_fresh.default and first.dim() == 0:
            with no_dispatch():
                return FakeTensor(self, torch.empty((), dtype=first.dtype, device="meta"), "cpu")
        if "device" in kwargs:  # `torch.set_default_device` comes after every other mode
            kwargs = kwargs | {"device": _cpu_for_cuda(kwargs["device"])}
        return self.dispatch(func, types, args, kwargs)

    def __deepcopy__(self, memo):
        return self  # a copied module's tensors stay tensors of this mode


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
def paged_states(zeros_on_host):
    """Let bitsandbytes' paged optimizers page, which they do on CUDA only.

    zeros_on_host: makes each state that is paged, those of 100,000 elements and more
    (`Optimizer8bit.get_state_buffer` in bitsandbytes/optim/optimizer.py).
    """
    if "bitsandbytes" not in sys.modules:
        yield
        return
    optimizer_class = sys.modules["bitsandbytes.optim.optimizer"].Optimizer8bit

    def get_state_buffer(self, p, dtype=torch.float32):
        if self.is_paged and p.numel() >= 100_000:
            return zeros_on_host(p, dtype)
        return torch.zeros_like(p, dtype=dtype, device=p.device)

    with mock.patch.object(optimizer_class, "get_state_buffer", get_state_buffer):
        yield


@contextlib.contextmanager
def saved_on_host(tracer):
    """Let `torch.autograd.graph.save_on_cpu` move what autograd saves off the card and back.

    Its own hooks would find every tensor on the cpu already and leave it there.
    """

    def init(self, pin_memory=False, device_type="cuda"):
        def pack(tensor):
            return tracer.to_host(tensor, torch.empty if pin_memory else torch.empty_like)

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
        args = [_cpu_for_cuda(v) if isinstance(v, (str, torch.device)) else v for v in args]
        if kwargs:
            kwargs = {name: _cpu_for_cuda(value) for name, value in kwargs.items()}
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
        here = [_cpu_for_cuda(value) for value in rest]
        options = {name: _cpu_for_cuda(value) for name, value in kwargs.items()}
        if any(isinstance(value, str) and value == "cpu" for value in named):
            if self.on_host(tensor) or tensor.requires_grad:  # a graph goes on where it is
                return torch.Tensor.to(tensor, *here, **options)
            return torch.Tensor.to(self.to_host(tensor), *here, **options)
        # What fake tensors call their device is the card: `.to(model.device)` goes there, too.
        to_card = any(
            isinstance(value, torch.device) or _cpu_for_cuda(value) is not value for value in named
        )
        if to_card and quantized.is_to_be(tensor):
            if self.on_host(tensor):
                tensor.data = torch.empty(tensor.shape, dtype=quantized.source_dtype(tensor))
            quantized.quantized(tensor, tensor.device)
            return tensor
        if to_card and self.on_host(tensor):
            dtypes = [value for value in named if isinstance(value, torch.dtype)]
            moved = torch.empty(tensor.shape, dtype=dtypes[0] if dtypes else tensor.dtype)
            if not isinstance(tensor, FakeTensor):
                moved._memlab_data = tensor
            return moved
        return torch.Tensor.to(tensor, *here, **options)


def _cpu_for_cuda(value):
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
    _original_scaler_init(self, _cpu_for_cuda(device), *args, **kwargs)


def _apply_and_tell(moved):
    """`Module._apply` without `swap_tensors`, which refuses fake tensors."""

    def _apply(self, function, recurse=True):
        if recurse:
            for module in self.children():
                module._apply(function)
        for parameter in self._parameters.values():
            if parameter is None:
                continue
            if not quantized.quantized(parameter, parameter.device):
                with torch.no_grad():
                    applied = function(parameter)
                if applied is not parameter:
                    parameter.data = applied
            moved(parameter)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = function(buffer)
        return self

    return _apply


def _with_data(function):
    """bitsandbytes reads the table of its 8-bit numbers while it makes it."""

    def run(*args, **kwargs):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def _weight_of_a_file(tensor, device=None, dtype=None):
    """A weight of a checkpoint, of which only the shape and the dtype are wanted."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        weight = tensor[...]
    return torch.empty(weight.shape, dtype=dtype or weight.dtype)


def _always_step(self, optimizer, optimizer_state, *args, **kwargs):
    return optimizer.step(*args, **kwargs)
