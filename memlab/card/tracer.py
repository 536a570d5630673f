"""What is on the card and what on its host, and what CUDA's libraries take beside the tensors."""

import contextlib
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memlab.card import kernels
from memlab.card.memory import CardMemory
from memlab.card.rules import RULES
from memlab.footprint import Category, Phase
from memlab.gpus import GPU
from memlab.trace.tracer import Tracer


class CardTracer(Tracer):
    """A tracer of one card: it knows the host's tensors and takes the libraries' workspaces.

    rules: which of `memlab.card.rules.RULES` hold; met_rules: those that were at work.
    """

    def __init__(self, gpu: GPU, rules=frozenset(RULES)):
        super().__init__(CardMemory(gpu))
        self.gpu, self.rules = gpu, rules
        self.met_rules: set[str] = set()
        self._handles_used = set()
        self._making_on_host = self._stopped = False
        self._kept_on_host = weakref.WeakValueDictionary()
        self._host_data = weakref.WeakValueDictionary()
        self._arguments, self._met_host_data = (), False

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
            self._take_and_give_back(scratch)
        return out

    def _take_and_give_back(self, nbytes) -> None:
        self.died(self.born(nbytes, Category.TEMPORARY))

    def stop(self) -> None:
        """Enter nothing any more: what dies from now on was there to the end."""
        self._stopped = True

    def died(self, storage) -> None:
        """As `Tracer.died`, until the card is left."""
        if not self._stopped:
            super().died(storage)

    # ------------------------------------------------------------------ the host

    @contextlib.contextmanager
    def host(self):
        """What is made inside is not on the card until an operation outside needs it."""
        before, self._making_on_host = self._making_on_host, True
        try:
            yield
        finally:
            self._making_on_host = before

    def is_still_on_host(self, parameter) -> bool:
        """Whether a parameter was made in `host` and nothing has brought it to the card yet."""
        if not isinstance(parameter, FakeTensor) or parameter.fake_device.type == "meta":
            return False
        return not self._making_on_host and not self.is_counted(parameter)

    def moved(self, parameter) -> None:
        """A parameter has come to the card, and been quantized on the way if it is to be."""
        self.operation = None
        self.see_parameter(parameter)
        parameter._memlab_loaded = len(self)  # the number of the entry after its last

    def zeros_on_host(self, like, dtype):
        """Zeros of the shape of `like` that the card never holds."""
        with self.host():
            zeros = torch.zeros_like(like, dtype=dtype)
        return self._by_rule("paged states", zeros)

    def _by_rule(self, rule, tensor):
        """A new tensor whose storage counts as the host's from now on, if the rule holds."""
        self.met_rules.add(rule)
        if rule in self.rules:
            storage = tensor.untyped_storage()
            self._kept_on_host[id(storage)] = storage
        return tensor

    def copy_to_card(self, tensor):
        """A copy on the card of what `copy_to_host` gave."""
        copy = torch.empty_like(tensor)
        self.see(copy, Category.ACTIVATIONS)
        return copy

    def copy_to_host(self, tensor, make=torch.empty_like):
        """A copy of a tensor that the host holds.

        make: `torch.empty_like`, or `torch.empty` for one without the strides of `tensor`. Where
        strides differ, a copy in the right order is made on the card first
        (`copy_requires_temporaries` in aten/src/ATen/native/cuda/Copy.cu).
        """
        with self.host():
            like = tensor if make is torch.empty_like else tensor.shape
            copy = make(like, dtype=tensor.dtype)
        storage = copy.untyped_storage()
        self._host_data[id(storage)] = storage
        if copy.stride() != tensor.stride():
            self._take_and_give_back(copy.nbytes)
        return copy

    def on_host(self, tensor) -> bool:
        """Whether a tensor holds data that was made outside, or was made of such data.

        A parameter with data is taken to lie on the card: a new one would not be the optimizer's.
        """
        if not isinstance(tensor, FakeTensor):
            return not isinstance(tensor, torch.nn.Parameter)
        return id(tensor.untyped_storage()) in self._host_data

    def see_result(self, out) -> None:
        """What is made of host data alone lies on the host, too."""
        if self._met_host_data and not any(map(self.is_counted, _tensors(self._arguments))):
            for tensor in _tensors([out]):
                storage = tensor.untyped_storage()
                self._host_data[id(storage)] = storage
        else:
            super().see_result(out)

    def see(self, tensor, category=None, existed=False) -> None:
        """As `Tracer.see`, for what is on the card."""
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta":
            return  # made with device="meta": it takes no memory anywhere
        known_here = category is not None and not isinstance(tensor, FakeTensor)
        if existed and not known_here and self.on_host(tensor):
            self._met_host_data = True
        elif not self._making_on_host and id(tensor.untyped_storage()) not in self._kept_on_host:
            super().see(tensor, category, existed)

    # ------------------------------------------------------------------ the libraries

    def _take_workspaces(self, func) -> None:
        """cuBLAS takes a workspace at a thread's first product and keeps it.

        The backward pass has a thread, and so a handle and a workspace, of its own
        (aten/src/ATen/cuda/CublasHandlePool.cpp); so has cublasLt, which addmm uses for the
        bias.
        """
        if not kernels.uses_cublas(func):
            return
        self.operation = func
        thread = self.phase() == Phase.BACKWARD
        for handle, nbytes in (
            ("cublas", self.gpu.workspace),
            ("cublasLt", kernels.CUBLASLT_WORKSPACE),
        ):
            wanted = handle == "cublas" or func is torch.ops.aten.addmm.default
            if wanted and (handle, thread) not in self._handles_used:
                self._handles_used.add((handle, thread))
                self.born(nbytes, Category.WORKSPACES)


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
