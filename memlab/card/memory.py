"""Memory served as a CUDA device serves it: workspaces, rounding, host tensors and a limit."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memlab.card import kernels
from memlab.card.kernels import RULES
from memlab.gpus import GPU, cublas_workspace
from memlab.trace.allocator import CachingAllocator, CapacityError
from memlab.trace.ledger import BACKWARD, FORWARD
from memlab.trace.tracer import Tracer


class CudaTracer(Tracer):
    """A tracer that serves memory as a CUDA device does, with its workspaces and its limit."""

    def __init__(self, gpu: GPU | None, allocator: CachingAllocator, rules=frozenset(RULES)):
        super().__init__(allocator)
        self.gpu, self.rules = gpu, rules
        self.met_rules: set[str] = set()
        self.workspace = gpu.workspace if gpu else cublas_workspace((8, 0))
        self._handles_used = set()
        self._unseen = False
        self._on_host = weakref.WeakValueDictionary()
        self._host_data = weakref.WeakValueDictionary()
        self._arguments, self._met_host_data = (), False
        self._loading = False
        self.loaded: dict[int, tuple[int, torch.nn.Parameter]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # asked very often, touches no memory
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        # A number made by torch.tensor() without a device stays on the host.
        if func is torch.ops.aten.lift_fresh.default and args[0].dim() == 0:
            return self._by_rule("numbers on the host", func(*args))
        self._take_workspaces(func)
        self._arguments, self._met_host_data = args, False
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._arguments = ()
        scratch = kernels.kernel_scratch(func, args)
        if scratch:
            self.met_rules.add("softmax backward")
        if scratch and "softmax backward" in self.rules:
            self._death(self._birth(scratch, "temporary"))
        return out

    def zeros_on_host(self, like, dtype):
        """Zeros of the shape of `like` that the card never holds."""
        with self.unseen():
            zeros = torch.zeros_like(like, dtype=dtype)
        return self._by_rule("paged states", zeros)

    def _by_rule(self, rule, tensor):
        """A tensor that lies on the host if the rule holds."""
        self.met_rules.add(rule)
        return self.keep_on_host(tensor) if rule in self.rules else tensor

    def copy_to_card(self, tensor):
        """A copy on the card of what `to_host` gave."""
        copy = torch.empty_like(tensor)
        self._see(copy, "activations")
        return copy

    @contextlib.contextmanager
    def unseen(self):
        """What is made inside is not on the card until an operation outside needs it."""
        self._unseen = True
        try:
            yield
        finally:
            self._unseen = False

    @contextlib.contextmanager
    def loading(self):
        """Weights that move inside come to the card one after the other, even if nothing is
        computed with them; `loaded` notes each with the number of the event after its last.
        """
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    def moved(self, parameter) -> None:
        """A parameter has moved to the card, and been quantized on the way if it is to be."""
        if self._loading:
            self._maker = None
            self._see_parameter(parameter)
            self.loaded.setdefault(id(parameter), (len(self.events), parameter))

    def keep_on_host(self, tensor):
        """Count a new tensor's storage as the host's from now on."""
        storage = tensor.untyped_storage()
        self._on_host[id(storage)] = storage
        return tensor

    def to_host(self, tensor, make=torch.empty_like):
        """A copy of a tensor that the host holds.

        make: `torch.empty_like`, or `torch.empty` for one without the strides of `tensor`. Where
        strides differ, a copy in the right order is made on the card first
        (`copy_requires_temporaries` in aten/src/ATen/native/cuda/Copy.cu).
        """
        with self.unseen():
            like = tensor if make is torch.empty_like else tensor.shape
            copy = make(like, dtype=tensor.dtype)
        storage = copy.untyped_storage()
        self._host_data[id(storage)] = storage
        if copy.stride() != tensor.stride():
            self._death(self._birth(copy.nbytes, "temporary"))
        return copy

    def on_host(self, tensor) -> bool:
        """Whether a tensor holds data that was made outside, or was made of such data.

        A parameter with data is taken to lie on the card: a new one would not be the optimizer's.
        """
        if not isinstance(tensor, FakeTensor):
            return not isinstance(tensor, torch.nn.Parameter)
        return id(tensor.untyped_storage()) in self._host_data

    def _see_result(self, out) -> None:
        """What is made of host data alone lies on the host, too."""
        if self._met_host_data and not any(map(self._on_card, _tensors(self._arguments))):
            for tensor in _tensors([out]):
                storage = tensor.untyped_storage()
                self._host_data[id(storage)] = storage
        else:
            super()._see_result(out)

    def _on_card(self, tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._live

    def _take_workspaces(self, func) -> None:
        """cuBLAS takes a workspace at a thread's first product and keeps it.

        The backward pass has a thread, and so a handle and a workspace, of its own
        (aten/src/ATen/cuda/CublasHandlePool.cpp); so has cublasLt, which addmm uses for the
        bias.
        """
        if not kernels.uses_cublas(func):
            return
        self._maker = func
        thread = self._phase() == BACKWARD
        for handle, nbytes in (
            ("cublas", self.workspace),
            ("cublasLt", kernels.CUBLASLT_WORKSPACE),
        ):
            wanted = handle == "cublas" or func is torch.ops.aten.addmm.default
            if wanted and (handle, thread) not in self._handles_used:
                self._handles_used.add((handle, thread))
                self._birth(nbytes, "workspaces")

    def _see(self, tensor, category=None, existed=False) -> None:
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta":
            return  # made with device="meta": it takes no memory anywhere
        known_here = category is not None and not isinstance(tensor, FakeTensor)
        if existed and not known_here and self.on_host(tensor):
            self._met_host_data = True
        elif not self._unseen and id(tensor.untyped_storage()) not in self._on_host:
            super()._see(tensor, category, existed)

    def _birth(self, nbytes, category) -> int:
        try:
            return super()._birth(nbytes, category)
        except CapacityError as error:
            raise torch.OutOfMemoryError(self._message(error.segment)) from None

    def free_and_total(self) -> tuple[int, int]:
        """Bytes free on the card and its size, as `torch.cuda.mem_get_info` gives them."""
        if self.gpu is None:
            raise ValueError("mem_get_info needs a card: SimulatedGPU was given none")
        used = self.gpu.context + self.allocator.reserved
        return self.gpu.total_memory - used, self.gpu.total_memory

    def _message(self, segment) -> str:
        """PyTorch's words: c10/cuda/CUDACachingAllocator.cpp."""
        free, total = self.free_and_total()
        allocated, reserved = self.allocator.allocated, self.allocator.reserved
        return (
            f"CUDA out of memory. Tried to allocate {_size(segment)}. GPU 0 has a total capacity "
            f"of {_size(total)} of which {_size(free)} is free. Including non-PyTorch memory, "
            f"this process has {_size(total - free)} memory in use. Of the allocated memory "
            f"{_size(allocated)} is allocated by PyTorch, and {_size(reserved - allocated)} is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
            "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
            "See documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Replay(CudaTracer):
    """A tracer that is told what happens; `phase` and `module` say when and where."""

    phase, module = FORWARD, ""

    def _phase(self) -> str:
        return self.phase

    def _module(self) -> str:
        return self.module


def _size(nbytes: int) -> str:
    """Bytes in the words of the allocator's `format_size`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes > unit or (unit == 2**10 and nbytes == unit):
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
