"""A stand-in for a CUDA GPU: code written for "cuda" computes on a machine without one.

    with stand_in("T4"):
        ...

Every tensor keeps its data in the host's memory, and each storage remembers whether CUDA would have
put it on the GPU. The chapters run on it in tests, so that the errors of a real GPU appear there:

- `torch.cuda` and `torch.accelerator` answer as that GPU; `tensor.device` is cuda:0.
- An operation on tensors of both devices raises CUDA's error. So do `.numpy()` of a GPU tensor,
  pinning one, and using one in a forked worker.
- memlab's copy of PyTorch's allocator serves the storages on the GPU and cuBLAS's workspaces. The
  counters count, and a full GPU runs out of memory.
- Inside a `SimulatedGPU` the stand-in steps aside, because a simulation refuses tensors of any
  other GPU.

Known limitations: there are no CUDA kernels, so their scratch memory and the number formats that
they lack do not show. There are no streams, and times are those of the CPU. Autocast for "cuda"
casts by the CPU's list of operators.
"""

import collections
import contextlib
import math
import os
import sys
import threading
import weakref
from dataclasses import replace
from unittest import mock

import torch
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memlab import SimulatedGPU
from memlab.card.autocast import AUTOCAST
from memlab.card.cuda_api import cuda_answers
from memlab.evidence import worker
from memlab.gpus import find_gpu
from memlab.libraries import import_bitsandbytes
from memlab.trace.card_memory import CardMemory

DRIVERS_NAMES = {"T4": "Tesla T4", "H100": "NVIDIA H100 80GB HBM3"}
CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten


class StandInCard:
    """The memory of the GPU, and the storages that are in it."""

    def __init__(self, gpu):
        self.gpu, self.allocator = gpu, CardMemory(gpu)
        self.allocator.trace = collections.deque(maxlen=0)  # keep no trace: millions of requests
        self._blocks = {}  # storage's key -> (address, bytes), of each storage on the GPU
        self._pinned = weakref.WeakSet()
        self._handles = set()  # cuBLAS handles: one per thread, and autograd has its own thread
        self._process = os.getpid()
        # `cuda_answers` expects a tracer with a stream and assumptions. Here everything runs on the
        # default stream, and values are known, so nothing is assumed.
        self.stream, self.stream_object = 0, None
        self._now = threading.local()
        self.assumptions: dict[str, None] = {}

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def reset_peak(self) -> None:
        self.allocator.reset_peak_stats()

    def is_forked(self) -> bool:
        """Whether this is a forked child process, in which CUDA cannot be used."""
        return os.getpid() != self._process

    def holds(self, tensor) -> bool:
        """Whether the tensor's data would be on the GPU."""
        # torch.func wraps tensors; the wrapper has no storage of its own.
        while functorch.is_functorch_wrapped_tensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        if not is_real(tensor) or getattr(self._now, "in_kernel", False):
            return False
        return self.holds_storage(tensor.untyped_storage())

    def holds_storage(self, storage) -> bool:
        """Whether a storage would be on the GPU."""
        # `_cdata` is the address of the C++ storage, which is unique as long as the storage lives.
        return storage._cdata in self._blocks

    def take(self, storage) -> None:
        """Allocate GPU memory for a storage, of its present size, until the storage is freed."""
        key, nbytes = storage._cdata, storage.nbytes()
        known = key in self._blocks
        if known and self._blocks[key][1] == nbytes:
            return
        if known:  # it was resized
            self._give_back(key)
        # Raises torch.OutOfMemoryError if the GPU is full.
        self._blocks[key] = self.allocator.allocate(nbytes) if nbytes else None, nbytes
        if not known:
            weakref.finalize(storage, self._give_back, key).atexit = False

    def _give_back(self, key):
        # No block if the storage was resized and the GPU was full. A forked child must not free:
        # its copy of the allocator is not the parent's.
        address, _ = self._blocks.pop(key, (None, 0))
        if address is not None and not self.is_forked():
            self.allocator.free(address)

    def take_workspace(self) -> None:
        """Allocate cuBLAS's workspace, once per thread that multiplies matrices.

        With CUDA the backward pass runs in a thread of its own. On a CPU it does not, so being
        inside a backward pass stands for the second thread.
        """
        handle = torch._C._current_graph_task_id() != -1
        if handle not in self._handles:
            self._handles.add(handle)
            self.allocator.allocate(self.gpu.workspace)

    @property
    def making(self) -> bool | None:
        """Whether new tensors of the current call go to the GPU; None follows its arguments."""
        return getattr(self._now, "making", None)

    @contextlib.contextmanager
    def makes(self, on_card: bool | None):
        """Inside, new tensors go to the GPU (True), to the host (False) or to their arguments."""
        before, self._now.making = self.making, on_card
        try:
            yield
        finally:
            self._now.making = before

    @contextlib.contextmanager
    def kernel(self):
        """Inside, every tensor is on the CPU: kernels in Python check their tensors' device."""
        self._now.in_kernel = True
        try:
            yield
        finally:
            self._now.in_kernel = False

    def copy(self, tensor, to_card: bool) -> torch.Tensor:
        """A copy of the tensor on the GPU or on the host."""
        if self.is_forked():
            torch.cuda._lazy_init()  # raises CUDA's error for forked processes
        # `Calls` is switched off: it would put the copy on the tensor's own device.
        with self.makes(to_card), torch.no_grad(), torch._C.DisableTorchFunction():
            new = tensor.clone()
        if to_card:
            self.take(new.untyped_storage())  # `Places` may not be active in this thread
        return new

    def pin(self, tensor) -> torch.Tensor:
        """A copy that counts as pinned: a machine without CUDA cannot pin memory."""
        if self.holds(tensor):
            kind = tensor.type().replace("torch.", "torch.cuda.")
            raise RuntimeError(f"cannot pin '{kind}' only dense CPU tensors can be pinned")
        if self.is_pinned(tensor):
            return tensor
        new = self.copy(tensor, to_card=False)
        self.note_pinned(new)
        return new

    def note_pinned(self, tensor) -> None:
        self._pinned.add(tensor.untyped_storage())

    def is_pinned(self, tensor) -> bool:
        return is_real(tensor) and tensor.untyped_storage() in self._pinned


def is_real(tensor) -> bool:
    """Whether a tensor has a storage with data; fake, wrapped and sparse tensors do not."""
    if functorch.is_functorch_wrapped_tensor(tensor) or isinstance(tensor, FakeTensor):
        return False
    return tensor.layout == torch.strided


def tensors_of(things):
    """All tensors in nested arguments."""
    for thing in things:
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, (list, tuple)):
            yield from tensors_of(thing)
        elif isinstance(thing, dict):
            yield from tensors_of(thing.values())


def place_named(value) -> bool | None:
    """Whether a device argument names the GPU; None if it names neither the GPU nor the host."""
    if isinstance(value, int) and not isinstance(value, bool):
        return True  # PyTorch reads a bare number as the index of a GPU
    if isinstance(value, (str, torch.device)):
        kind = str(value).split(":")[0]
        return {"cuda": True, "cpu": False}.get(kind)
    return None


# Operators that accept tensors of both devices on CUDA too.
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
INDEXING = {  # the indices may be on the host
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
TOO_MANY_OPERATIONS = 1e11  # seconds on a CPU, milliseconds on a GPU


def product_or_none(func, left, right):
    """The operator, or for a very large product one that returns uninitialised memory.

    A benchmark at a GPU's size would take minutes on a CPU, and nobody reads its numbers.
    """
    shape = (*left.shape[:-1], right.shape[-1])
    if 2 * math.prod(shape) * left.shape[-1] < TOO_MANY_OPERATIONS:
        return func
    return lambda *args, **kwargs: left.new_empty(shape)


class Places(TorchDispatchMode):
    """The dispatch mode that gives each new storage a device and refuses what CUDA refuses."""

    supports_higher_order_operators = True

    def __init__(self, card):
        super().__init__()
        self.card = card

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that PyTorch does not wrap the dispatch in `torch._disable_dynamo`.

        That guard around every operation asks for a CUDA build.
        """
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if SimulatedGPU.entered:  # the simulation has its own dispatch mode
            return func(*args, **kwargs)
        card, making, kernel = self.card, self.card.making, func
        given = list(tensors_of((args, kwargs)))
        on_card = any(map(card.holds, given))
        if place_named(kwargs.get("device")):  # compute on the host, take the result as the GPU's
            kwargs, making = kwargs | {"device": HOST}, True
        if (on_card or making) and card.is_forked():
            torch.cuda._lazy_init()  # raises CUDA's error for forked processes
        if on_card:
            self._refuse_mixed(func, args, given)
            if func in PRODUCTS:
                card.take_workspace()
                kernel = product_or_none(func, *args[-2:])
        pinned = kwargs.get("pin_memory")
        if pinned:  # the CPU build has no pinned memory; only note it
            kwargs = kwargs | {"pin_memory": False}
        with contextlib.nullcontext() if func.namespace == "aten" else card.kernel():
            out = kernel(*args, **kwargs)
        if pinned:
            card.note_pinned(out)
        if on_card if making is None else making:
            # `torch.tensor(...)` passes its new tensor through `lift_fresh`, which returns it. Any
            # other operator that returns an argument's storage (a view) moves nothing.
            lifted = func is aten.lift_fresh.default
            old = () if lifted else {t.untyped_storage()._cdata for t in given if is_real(t)}
            for tensor in tensors_of([out]):
                if is_real(tensor) and (
                    tensor.untyped_storage()._cdata not in old or card.holds(tensor)
                ):
                    card.take(tensor.untyped_storage())
        return out

    def _refuse_mixed(self, func, args, given):
        """Raise CUDA's error for an operation on tensors of both devices.

        Tensors without dimensions are allowed on either device, as on CUDA.
        """
        if func in COPIES or func.namespace not in ("aten", "bitsandbytes"):
            return
        if func in INDEXING:
            given = [args[0], *args[2:3]]  # the tensor and the values, without the indices
        hosts = [t for t in given if t.dim() and is_real(t) and not self.card.holds(t)]
        if hosts:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{CUDA} and cpu! ({func})"
            )


class Calls(TorchFunctionMode):
    """The function mode that derives from each call where its new tensors belong.

    The operator alone does not tell. Inside `torch.nn.functional` or autograd, a tensor of zeros is
    created for tensors that the operator never sees.
    """

    def __init__(self, card):
        super().__init__()
        self.card = card

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if SimulatedGPU.entered or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):  # from another mode, inside another call
            return func(*args, **kwargs)
        # Device arguments that are parsed, not used: a bare number means a GPU.
        if func in (torch.device, torch._C._nn._parse_to):
            if args and isinstance(args[0], int):
                args = (torch.device("cuda", args[0]), *args[1:])
            return func(*args, **kwargs)
        # A named device decides; otherwise, any argument on the GPU does.
        making = place_named(kwargs["device"]) if "device" in kwargs else None
        if making is not None:
            kwargs = kwargs | {"device": HOST}
        elif any(map(self.card.holds, tensors_of((args, kwargs)))):
            making = True
        with self.card.makes(making):
            return func(*args, **kwargs)


class Moved(torch.autograd.Function):
    """A copy of a tensor on the other device; its gradient is copied back."""

    @staticmethod
    def forward(ctx, tensor, card, to_card):
        ctx.card, ctx.to_card = card, to_card
        return card.copy(tensor, to_card)

    @staticmethod
    def backward(ctx, gradient):
        return Moved.apply(gradient, ctx.card, not ctx.to_card), None, None


def attributes(card) -> dict:
    """The attributes of a tensor that tell its device: name -> replacement."""
    device, is_cuda, is_cpu = torch.Tensor.device, torch.Tensor.is_cuda, torch.Tensor.is_cpu
    get_device = torch.Tensor.get_device

    def says(there, getter):
        return property(lambda tensor: there if card.holds(tensor) else getter.__get__(tensor))

    return {
        "device": says(CUDA, device),
        "is_cuda": says(True, is_cuda),
        "is_cpu": says(False, is_cpu),
        "get_device": lambda tensor: 0 if card.holds(tensor) else get_device(tensor),
    }


def moves(card) -> dict:
    """The methods of a tensor that move it between the devices: name -> replacement.

    They are methods, not cases in a mode, because hooks of autograd and other threads call them
    where no mode is active.
    """
    tensor_to, tensor_numpy = torch.Tensor.to, torch.Tensor.numpy

    def plain(tensor, *args, **kwargs):
        with card.makes(card.holds(tensor)), torch._C.DisableTorchFunction():
            return tensor_to(tensor, *args, **kwargs)

    def to(tensor, *args, **kwargs):
        first = args[0] if args else kwargs.get("device", kwargs.get("other"))
        other = isinstance(first, torch.Tensor)
        goal = card.holds(first) if other else place_named(first)
        if goal is None or not is_real(tensor) or tensor.is_meta:
            return plain(tensor, *args, **kwargs)
        # Move first, then let PyTorch do the rest of the call, such as a cast, as on the CPU.
        options = {k: v for k, v in kwargs.items() if k not in ("device", "other")}
        args = (HOST, *([first.dtype] if other else []), *args[1:])
        if goal != card.holds(tensor):
            options.pop("copy", None)  # the move has copied it already
            tensor = Moved.apply(tensor, card, goal)
        return plain(tensor, *args, **options)

    def numpy(tensor, *args, **kwargs):
        if card.holds(tensor):
            raise TypeError(
                f"can't convert {CUDA} device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return tensor_numpy(tensor, *args, **kwargs)

    return {
        "to": to,
        "cuda": lambda tensor, *options, **more: to(tensor, "cuda"),
        "cpu": lambda tensor, *options, **more: to(tensor, "cpu"),
        "numpy": numpy,
        "pin_memory": lambda tensor, *device: card.pin(tensor),
        "is_pinned": lambda tensor, *device: card.is_pinned(tensor),
    }


def storages(card):
    """Patches for copying storages, and for their device in files of `torch.save`."""
    clone = torch.UntypedStorage.clone
    packages = torch.serialization._package_registry

    def cloned(storage):
        new = clone(storage)
        if card.holds_storage(storage):
            card.take(new)
        return new

    def place_of(storage):
        return str(CUDA) if card.holds_storage(storage) else None

    def put_back(storage, place):
        if place_named(place):
            card.take(storage)
            return storage

    yield torch.UntypedStorage, {"clone": cloned}
    # Priority 0, so that it is asked before PyTorch's own entry for the CPU.
    yield torch.serialization, {"_package_registry": [(0, place_of, put_back), *packages]}


def autograd(card):
    """Patches for the backward pass, so that `Calls` sees its hooks and recomputation too.

    `Tensor.backward` is itself a call, and a function mode is off while it handles a call.
    """
    run_backward, profile = torch.autograd._engine_run_backward, torch.autograd.profiler.profile
    profile_init = profile.__init__

    def backward(outputs, *args, **kwargs):
        with card.makes(any(map(card.holds, tensors_of([outputs])))), Calls(card):
            return run_backward(outputs, *args, **kwargs)

    def profiles_the_cpu(self, *args, use_device=None, **kwargs):
        profile_init(self, *args, **kwargs)

    yield torch.autograd, {"_engine_run_backward": backward}
    yield profile, {"__init__": profiles_the_cpu}


def simulations(to_and_fro):
    """Patches that give a `SimulatedGPU` PyTorch's own methods to move tensors."""
    enter, leave = SimulatedGPU.__enter__, SimulatedGPU.__exit__

    def step_aside(simulation):
        to_and_fro.stop()
        try:
            return enter(simulation)
        except BaseException:
            to_and_fro.start()
            raise

    def step_back(simulation, *error):
        try:
            return leave(simulation, *error)
        finally:
            to_and_fro.start()

    yield SimulatedGPU, {"__enter__": step_aside, "__exit__": step_back}


@contextlib.contextmanager
def stand_in(name: str):
    """Pretend in this process that the GPU of this name, "T4" or "H100", is installed.

    Yields the `StandInCard`.
    """
    import_bitsandbytes("the stand-in")  # now, while no GPU is visible: it loads its CPU library
    card = StandInCard(replace(find_gpu(name), name=DRIVERS_NAMES[name]))
    compiles, to_and_fro = torch.compile, mock.patch.multiple(torch.Tensor, **moves(card))
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_answers(card, lambda: {"segments": [], "device_traces": [[]]}))
        for target, names in (
            (torch.Tensor, attributes(card)),
            *storages(card),
            *autograd(card),
            *((target, {name: value}) for target, name, value in AUTOCAST),
            *simulations(to_and_fro),
            # `cuda_answers` refuses these for a simulation; the stand-in can serve them.
            (torch, {"compile": compiles}),
            (torch.cuda, {"_is_in_bad_fork": card.is_forked}),
            (torch.cuda, {"default_generators": (torch.default_generator,)}),
        ):
            for attribute, value in names.items():
                stack.enter_context(mock.patch.object(target, attribute, value))
        # transformers would load weights in threads, where no mode is active.
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        to_and_fro.start()
        stack.callback(to_and_fro.stop)
        stack.enter_context(Calls(card))
        stack.enter_context(Places(card))
        yield card


# Run as a notebook's kernel: the first argument is the GPU's name, the rest comes from Jupyter.
if __name__ == "__main__":
    from ipykernel.kernelapp import launch_new_instance

    named = sys.argv.pop(1)
    # `memlab record` measures in processes of its own. They must run on the stand-in too.
    worker.COMMAND = [sys.executable, __file__, named, "worker"]
    with stand_in(named):
        worker.work() if sys.argv[1:] == ["worker"] else launch_new_instance()
