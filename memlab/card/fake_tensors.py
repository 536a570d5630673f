"""Fake tensors for real training code: every tensor has a shape, a dtype and a lifetime, no data.

PyTorch's FakeTensorMode infers the shapes. This module answers what such a mode refuses: `.item()`
and the gradient scaler's check for infinities. It also patches the places in PyTorch, transformers
and bitsandbytes that read values, start threads, or take a fake tensor as a sign of tracing. By
itself it simulates a CPU; `memlab.card.placement` and `memlab.card.moves` add the GPU.
"""

import contextlib
import functools
import logging
import os
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader
from torch.utils.data._utils import pin_memory, worker
from transformers import GenerationMixin, core_model_loading, masking_utils

from memlab.card.fake_output_cache import FakeOutputCache
from memlab.card.kernels import bitsandbytes
from memlab.card.known_values import values_of
from memlab.card.placement import HOST, is_cuda_device, pin, with_data
from memlab.trace.patches import replaced


@contextlib.contextmanager
def tensors_without_data():
    """Make every tensor a fake one: with a shape, a dtype and a lifetime, but no data.

    What a training loop usually reads is answered: `.item()` returns 1, and the gradient scaler
    always steps. Code that depends on values in any other way gets PyTorch's own error.
    """
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(NoData(allow_non_fake_inputs=True))
        stack.enter_context(bitsandbytes.without_data(_with_data))
        batches = dataloader._MultiProcessingDataLoaderIter
        rows = (
            (torch.nn.Module, "_apply", apply_by(_move)),
            (UNINITIALIZED, "materialize", _materialize),
            (torch.amp.GradScaler, "_maybe_opt_step", _always_step),
            # FakeTensorMode logs an error of a shape rule in fifty lines before it raises it, even
            # if the caller expects the error.
            (fake_tensor, "log", _SILENT),
            # transformers takes a fake tensor as a sign of tracing (`is_tracing` in
            # transformers/utils/import_utils.py) and then builds masks that a run never builds.
            (masking_utils, "is_tracing", lambda *a, **k: False),
            (masking_utils, "find_packed_sequence_indices", _packed_sequences),
            # A DataLoader's workers create host tensors with data, and its iterator receives them.
            (worker, "_worker_loop", _with_data(worker._worker_loop)),
            (batches, "_try_get_data", _with_data(batches._try_get_data)),
            # With workers, pinning runs in a thread of its own, which no mode follows.
            (pin_memory, "pin_memory", _pin_batch),
            *((masking_utils, name, _only_without_mask(name)) for name in MASK_SKIPS),
            (core_model_loading, "_materialize_copy", _weight_of_a_file),
            (GenerationMixin, "_check_early_stop_heuristic", staticmethod(_may_improve)),
        )
        stack.enter_context(replaced(*rows))
        # transformers reads the weights of a checkpoint in threads, which no mode follows
        # (`core_model_loading.py`). This setting makes it read them one after the other.
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        yield mode


def without_draws():
    """Let truncated normal initialization draw nothing.

    PyTorch draws again until it reads that all numbers lie within the bounds, which fake tensors
    never say. On the simulated GPU `memlab.card.waiting` ends that loop instead, and so counts the
    memory of a second draw.
    """
    return replaced((torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **more: tensor))


UNINITIALIZED = UninitializedParameter.__mro__[1]  # UninitializedTensorMixin: lazy layers' tensors
_SILENT = logging.Logger("fake tensors")
_SILENT.disabled = True

_original_find_packed = masking_utils.find_packed_sequence_indices


def _packed_sequences(position_ids):
    """`find_packed_sequence_indices`: which sequence each token belongs to, if rows are packed.

    None for one sequence per row, which is also assumed for positions without known values.
    """
    data = values_of(position_ids)
    if data is None or _with_data(_original_find_packed)(data) is None:
        return None
    # The values say that rows are packed: skip the check that reads them once more.
    with replaced((masking_utils, "is_tracing", lambda *a, **k: True)):
        return _original_find_packed(position_ids)


def _pin_batch(data, *args, **kwargs):
    """`torch.utils.data._utils.pin_memory.pin_memory`: mark the tensors of a batch as pinned."""
    return tree_map_only(torch.Tensor, pin, data)


# The functions by which transformers finds out that a mask hides nothing and can be dropped.
MASK_SKIPS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


def _only_without_mask(name):
    """Such a function, for which a padding mask without known values always hides something."""
    original = getattr(masking_utils, name)

    def ignore(padding_mask, *args, **kwargs):
        has_values = padding_mask is None or values_of(padding_mask) is not None
        return has_values and original(padding_mask, *args, **kwargs)

    return ignore


aten = torch.ops.aten
# Operators that return a view of their first argument -> the operator whose meta kernel does so.
VIEWS = {
    aten._unsafe_view.default: aten.view.default,
    aten.detach.default: aten.alias.default,
}
VIEWS |= {
    view: view
    for view in (
        *(aten.view.default, aten.t.default, aten.expand.default, aten.unsqueeze.default),
        *(aten.transpose.int, aten.slice.Tensor, aten.select.int),
    )
}


# PyTorch's cache of fake results would hold on to the storage argument of these, and its memory.
TAKE_STORAGE = {aten.set_.source_Storage, aten.set_.source_Storage_storage_offset}


class NoData(FakeTensorMode):
    """PyTorch's FakeTensorMode with an answer to `.item()`, and short cuts for common operators."""

    # FakeTensorMode's own property would let `torch.tensor` ask CUDA for memory as soon as
    # `torch.cuda.is_available()` answers True, as it does in a simulation.
    avoid_device_init = True
    dispatching = False  # True while PyTorch infers a result: see `placement`'s `device`

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.known_results = FakeOutputCache(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out `torch._disable_dynamo` around every operation: it costs time.

        `memlab.trace.tracer` does the same.
        """
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            # 1.0, True or 1, by the dtype
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        # Short cuts for results that are obvious. PyTorch's own inference, which looks at every
        # argument, would take most of a simulation's time.
        if func.namespace == "c10d" and func._opname == "allreduce_":
            return args[0], _done(args[0])
        if isinstance(func, torch._ops.OpOverload) and not func._schema.returns:
            return None  # it only writes into its arguments, as multi-tensor optimizers do
        first: Any = args[0] if args else None
        if func in VIEWS and isinstance(first, FakeTensor) and first.constant is None:
            with in_kernel_invocation_manager(self):
                view = VIEWS[func](*args, **kwargs)
            return FakeTensor(self, view, first.fake_device)
        # torch.tensor(2.0): PyTorch would keep the number as a constant of the fake tensor.
        if func is aten.lift_fresh.default and first.dim() == 0:
            with no_dispatch():
                return FakeTensor(self, torch.empty((), dtype=first.dtype, device="meta"), "cpu")
        device = kwargs.get("device")
        if device is not None and device.type != "meta":
            is_cuda_device(device)  # raises for a second GPU
            kwargs = kwargs | {"device": HOST}  # to PyTorch, all fake tensors are CPU tensors
            if func is aten._to_copy.default:
                # With the tensor's own device and no dtype it would return its argument
                # (`_to_copy` in torch/_decomp/decompositions.py).
                del kwargs["device"]
        before, self.dispatching = self.dispatching, True
        try:
            if func is aten._grouped_mm.default:
                return self._grouped_product(func, types, args, kwargs)
            if func in TAKE_STORAGE:
                return self._dispatch_impl(func, types, args, kwargs)
            make = functools.partial(self.dispatch, func, types, args, kwargs)
            return self.known_results.run(func, args, kwargs, make)
        finally:
            self.dispatching = before

    def _grouped_product(self, func, types, args, kwargs):
        """A grouped matrix product in any dtype. PyTorch infers its shape in bf16 only.

        Other dtypes are multiplied group by group into the same output
        (aten/src/ATen/native/cuda/GroupedBlas.cpp). Autocast does not know the operation
        (pytorch/pytorch#174763), so these dtypes do occur.
        """
        dtype = args[0].dtype
        args = tuple(arg.to(torch.bfloat16) if arg.dtype == dtype else arg for arg in args)
        product: Any = self.dispatch(func, types, args, kwargs)
        return product if dtype == torch.bfloat16 else product.to(dtype)

    def __deepcopy__(self, memo):
        return self  # a deep copy of a module must hold tensors of this mode


def _done(result):
    """A finished `Work` handle whose future holds `result`.

    DistributedDataParallel reads the future. The handle of PyTorch's fake process group has no
    result in it.
    """
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()


def apply_by(move, replaces=lambda module, name, new: None):
    """`Module._apply` without `torch.utils.swap_tensors`, which refuses fake tensors.

    move: a function that applies a function to a parameter in place.
    replaces: a callback, called before a buffer of a module is replaced by a new one.
    """

    def _apply(self, function, recurse=True):
        if recurse:
            for module in self.children():
                module._apply(function)
        for parameter in filter(lambda p: p is not None, self._parameters.values()):
            with torch.no_grad():
                # First the parameter, then its gradient: a `.grad` must have its tensor's dtype.
                gradient, parameter.grad = parameter.grad, None
                (_note_place if is_lazy(parameter) else move)(parameter, function)
                if gradient is not None:
                    parameter.grad = function(gradient)
        for name, buffer in self._buffers.items():
            if is_lazy(buffer):
                _note_place(buffer, function)
            elif buffer is not None:
                new = function(buffer)
                replaces(self, name, new)
                self._buffers[name] = new
        return self

    return _apply


def _note_place(lazy, function) -> None:
    """Note the device and the dtype that a lazy tensor, which has no shape yet, is to get."""
    lazy._memlab_like = function(_like(lazy))


def _like(lazy):
    """An empty tensor with the noted device and dtype of a lazy one."""
    like = getattr(lazy, "_memlab_like", None)
    return torch.empty(0, dtype=lazy.dtype, device=lazy.device) if like is None else like


def _materialize(self, shape, device=None, dtype=None) -> None:
    """`UninitializedTensorMixin.materialize`, with what `_note_place` has noted."""
    like = _like(self)
    # Unlike PyTorch, the class first: an uninitialized tensor has no storage to ask for, and the
    # patched `data` of `memlab.card.moves` asks for it.
    self.__class__ = self.cls_to_become
    self.data = torch.empty(shape, device=device or like.device, dtype=dtype or like.dtype)


def _move(parameter, function) -> None:
    if bitsandbytes.is_to_be(parameter):
        bitsandbytes.quantize(parameter, parameter.device)
    else:
        parameter.data = function(parameter)


def _may_improve(is_early_stop_heuristic_unsatisfied, **scores):
    """`GenerationMixin._check_early_stop_heuristic`: whether a beam search can still improve.

    The original compares scores, which are not known here. The search runs until all beams end.
    """
    return is_early_stop_heuristic_unsatisfied


def _with_data(function):
    """Wrap a function so that it runs on ordinary tensors."""

    # A spawned process gets a worker's function by name, and so finds the original.
    @functools.wraps(function)
    def run(*args, **kwargs):
        with with_data():
            return function(*args, **kwargs)

    return run


def _weight_of_a_file(tensor, device=None, dtype=None):
    """`core_model_loading._materialize_copy`: a weight of a checkpoint, without its data.

    Integers are read: bitsandbytes stores the JSON description of a 4-bit weight as a uint8 tensor.
    """
    with with_data():
        weight = tensor[...]
    if not weight.is_floating_point():
        return weight.to(device=device, dtype=dtype)
    return torch.empty(weight.shape, dtype=dtype or weight.dtype, device=device)


def _always_step(self, optimizer, optimizer_state, *args, **kwargs):
    return optimizer.step(*args, **kwargs)
