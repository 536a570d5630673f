"""Training loops on tensors without data."""

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

    What a training loop asks of values is answered: `.item()` gives 1, the gradient scaler
    always steps. What branches on values in another way raises PyTorch's own error.
    """
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(NoData(allow_non_fake_inputs=True))
        stack.enter_context(bitsandbytes.without_data(_with_data))
        batches = dataloader._MultiProcessingDataLoaderIter
        rows = (
            (torch.nn.Module, "_apply", apply_by(_move)),
            (UNINITIALIZED, "materialize", _materialize),
            (torch.amp.GradScaler, "_maybe_opt_step", _always_step),
            # Fifty lines of what is raised as well, also where a caller expects it.
            (fake_tensor, "log", _SILENT),
            # transformers takes a fake tensor for tracing and then builds masks that a run
            # never builds.
            (masking_utils, "is_tracing", lambda *a, **k: False),
            (masking_utils, "find_packed_sequence_indices", _packed_sequences),
            # A DataLoader's workers make tensors with data, on the host.
            (worker, "_worker_loop", _with_data(worker._worker_loop)),
            (batches, "_try_get_data", _with_data(batches._try_get_data)),
            # In a thread of its own.
            (pin_memory, "pin_memory", _pin_batch),
            *((masking_utils, name, _only_without_mask(name)) for name in MASK_SKIPS),
            (core_model_loading, "_materialize_copy", _weight_of_a_file),
            (GenerationMixin, "_check_early_stop_heuristic", staticmethod(_may_improve)),
        )
        stack.enter_context(replaced(*rows))
        # It reads weights in threads, which no mode follows.
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        yield mode


def without_draws():
    """Leave truncated normal weights as they are: PyTorch draws anew until it reads that all fit.

    On a simulated card `memlab.card.waiting` ends that loop, with what a second draw takes.
    """
    return replaced((torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **more: tensor))


UNINITIALIZED = UninitializedParameter.__mro__[1]  # what lazy parameters and buffers share
_SILENT = logging.Logger("fake tensors")
_SILENT.disabled = True

_original_find_packed = masking_utils.find_packed_sequence_indices


def _packed_sequences(position_ids):
    """Which sequence each token belongs to, where the values of the positions are known.

    Positions without data count as those of one sequence per row.
    """
    data = values_of(position_ids)
    if data is None or _with_data(_original_find_packed)(data) is None:
        return None
    with replaced((masking_utils, "is_tracing", lambda *a, **k: True)):
        return _original_find_packed(position_ids)


def _pin_batch(data, *args, **kwargs):
    """What a DataLoader pins, in a thread of its own where it has workers."""
    return tree_map_only(torch.Tensor, pin, data)


# Where transformers asks whether a mask hides anything at all, and drops it if not.
MASK_SKIPS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


def _only_without_mask(name):
    """A padding mask of unknown values hides something: that is what it is for."""
    original = getattr(masking_utils, name)

    def ignore(padding_mask, *args, **kwargs):
        has_values = padding_mask is None or values_of(padding_mask) is not None
        return has_values and original(padding_mask, *args, **kwargs)

    return ignore


aten = torch.ops.aten
VIEWS = {  # operators that make a view of their first argument: the kernel that does so
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


# PyTorch's cache of fake results would keep the storage that these are given, and its memory.
TAKE_STORAGE = {aten.set_.source_Storage, aten.set_.source_Storage_storage_offset}


class NoData(FakeTensorMode):
    """PyTorch's fake tensors, which refuse to be read, with an answer to `.item()`."""

    avoid_device_init = True  # also while `torch.cuda.is_available()` says yes
    dispatching = False  # whether PyTorch works out what an operation gives

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.known_results = FakeOutputCache(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard against torch.compile around every operation, as in `memlab.trace.tracer`."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        # Where the answer is plain, PyTorch's search for it, by all arguments, takes the most of a
        # simulation's time.
        if func.namespace == "c10d" and func._opname == "allreduce_":
            return args[0], _done(args[0])
        if isinstance(func, torch._ops.OpOverload) and not func._schema.returns:
            return None  # it writes into its arguments: the lists of multi-tensor optimizers
        first: Any = args[0] if args else None
        if func in VIEWS and isinstance(first, FakeTensor) and first.constant is None:
            with in_kernel_invocation_manager(self):
                view = VIEWS[func](*args, **kwargs)
            return FakeTensor(self, view, first.fake_device)
        if func is aten.lift_fresh.default and first.dim() == 0:
            with no_dispatch():
                return FakeTensor(self, torch.empty((), dtype=first.dtype, device="meta"), "cpu")
        device = kwargs.get("device")
        if device is not None and device.type != "meta":
            is_cuda_device(device)  # or refuses
            kwargs = kwargs | {"device": HOST}  # PyTorch takes all for cpu tensors
            if func is aten._to_copy.default:
                del kwargs["device"]  # given one and no dtype, it makes no copy
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
        """Products of groups in any dtype, of which PyTorch gives the shape in bf16 only.

        aten/src/ATen/native/cuda/GroupedBlas.cpp multiplies other dtypes group by group into the
        same output; autocast does not know the operation (pytorch/pytorch#174763).
        """
        dtype = args[0].dtype
        args = tuple(arg.to(torch.bfloat16) if arg.dtype == dtype else arg for arg in args)
        product: Any = self.dispatch(func, types, args, kwargs)
        return product if dtype == torch.bfloat16 else product.to(dtype)

    def __deepcopy__(self, memo):
        return self  # a copied module's tensors stay tensors of this mode


def _done(result):
    """The work of a collective that is done: DistributedDataParallel asks it for its result.

    That of PyTorch's fake process group has none.
    """
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()


def apply_by(move, replaces=lambda module, name, buffer: None):
    """`Module._apply` without `swap_tensors`, which refuses fake tensors.

    move: a function that changes a parameter as the function that it is given says.
    replaces: is told of each buffer before it.
    """

    def _apply(self, function, recurse=True):
        if recurse:
            for module in self.children():
                module._apply(function)
        for parameter in filter(lambda p: p is not None, self._parameters.values()):
            with torch.no_grad():
                gradient, parameter.grad = parameter.grad, None
                (_note_place if is_lazy(parameter) else move)(parameter, function)
                if gradient is not None:  # goes along
                    parameter.grad = function(gradient)
        for name, buffer in self._buffers.items():
            if is_lazy(buffer):
                _note_place(buffer, function)
            elif buffer is not None:
                replaces(self, name, buffer)
                self._buffers[name] = function(buffer)
        return self

    return _apply


def _note_place(lazy, function) -> None:
    """Let a tensor that has no shape yet know where it is to be made, and of which dtype."""
    lazy._memlab_like = function(_like(lazy))


def _like(lazy):
    """An empty tensor of the place and the dtype of a lazy one."""
    like = getattr(lazy, "_memlab_like", None)
    return torch.empty(0, dtype=lazy.dtype, device=lazy.device) if like is None else like


def _materialize(self, shape, device=None, dtype=None) -> None:
    """`UninitializedTensorMixin.materialize`, at the place that `_note_place` has noted."""
    like = _like(self)
    self.__class__ = self.cls_to_become
    self.data = torch.empty(shape, device=device or like.device, dtype=dtype or like.dtype)


def _move(parameter, function) -> None:
    if not bitsandbytes.quantize(parameter, parameter.device):
        parameter.data = function(parameter)


def _may_improve(is_early_stop_heuristic_unsatisfied, **scores):
    """Whether a beam search can still find better beams: it can, until all have ended.

    The scores that it compares are not known.
    """
    return is_early_stop_heuristic_unsatisfied


def _with_data(function):
    """The function, run on ordinary tensors also inside."""

    @functools.wraps(function)  # by whose name a spawned process finds the original
    def run(*args, **kwargs):
        with with_data():
            return function(*args, **kwargs)

    return run


def _weight_of_a_file(tensor, device=None, dtype=None):
    """A weight of a checkpoint, of which only the shape and the dtype are wanted.

    What is no floating-point number is read: the json text of a 4-bit weight is a tensor.
    """
    with with_data():
        weight = tensor[...]
    if not weight.is_floating_point():
        return weight.to(device=device, dtype=dtype)
    return torch.empty(weight.shape, dtype=dtype or weight.dtype, device=device)


def _always_step(self, optimizer, optimizer_state, *args, **kwargs):
    return optimizer.step(*args, **kwargs)
