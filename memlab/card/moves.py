"""Moves between the host and the simulated GPU, for code that is written for CUDA.

A function mode sees every PyTorch call of Python code before it becomes an operation. It carries
out `.to`, `.cuda`, `tensor.data = ...` and the like, and handles the few other functions that
depend on the device. It also notes the call in progress (`memlab.card.calls`). Tensors that moved
in from outside the simulation get their data back at its end. `torch.inference_mode` acts as
`torch.no_grad`, which takes the same memory.
"""

import contextlib
import importlib
import threading
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from memlab.card import legacy_types, refusals
from memlab.card.autocast import AUTOCAST
from memlab.card.calls import Call
from memlab.card.card_mode import CardMode
from memlab.card.fake_tensors import apply_by
from memlab.card.kernels import bitsandbytes, higher_order
from memlab.card.kernels.saved_tensors import is_simulated
from memlab.card.placement import (
    CARD,
    HOST,
    META,
    PLACE,
    device_of,
    is_cuda_device,
    is_pinned,
    names_host,
    pin,
    predates_context,
)
from memlab.trace.patches import replaced
from memlab.trace.tensors import is_wrapper_subclass, on_card

# By its full name: torch.optim deletes its attribute `optimizer` at the end of its import.
optimizers = importlib.import_module("torch.optim.optimizer")


@contextlib.contextmanager
def cuda_code(mode: CardMode):
    """Let code written for CUDA run, and tell the GPU's dispatch mode what Python calls."""
    names = DeviceMoveMode(mode)
    types = [*optimizers._foreach_supported_types, FakeTensor]
    init_hooks = torch.autograd.graph.saved_tensors_hooks.__init__
    rows = (
        *AUTOCAST,
        # Fake tensors take multi-tensor (foreach) kernels too, the default of optimizers on CUDA.
        (optimizers, "_foreach_supported_types", types),
        (torch.utils._foreach_utils, "_foreach_supported_types", types),
        # Meta functions of an SVD and of convolutions choose the strides by the device.
        (torch._meta_registrations, "device_hint", lambda tensor: "cuda"),
        (torch.nn.Module, "_apply", apply_by(_move_by(names), names.replaces)),
        (torch._C, "_InferenceMode", _without_gradients),
        (torch, "set_default_tensor_type", _set_default_tensor_type),
        # PyTorch disables a function mode inside its own calls, such as `Tensor.backward`. The
        # user's code that runs in there (hooks, custom backward passes) needs the mode again.
        (torch.autograd, "_engine_run_backward", names.entered(_run_backward)),
        (torch.autograd.graph.saved_tensors_hooks, "__init__", names.hooks(init_hooks)),
    )
    with replaced(*rows):
        try:
            with names:
                yield names
        finally:
            names.restore()


def _without_gradients(mode=True):
    """`torch.inference_mode` as `torch.no_grad`, which takes the same memory.

    In inference mode, a dispatch mode gets composite operators before PyTorch decomposes them, so
    the tensors that they create on the way would go unseen.
    """
    return torch.set_grad_enabled(not mode)


def _set_default_tensor_type(kind) -> None:
    parsed = legacy_types.parse(kind)
    if parsed is None:
        raise TypeError(f"{kind!r} is not a tensor type")
    device, dtype = parsed
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device == HOST else device)


@contextlib.contextmanager
def threads_come_along(mode: CardMode, names):
    """Enter the modes in every thread that is started inside, as PyTorch's modes are per thread."""
    start = threading.Thread.start

    def start_inside(thread):
        run, lifts = thread.run, torch._C._only_lift_cpu_tensors()

        def run_inside():
            # Per thread, too: torch.tensor(..., device="cuda") creates a CPU tensor and moves it,
            # instead of asking CUDA for memory.
            torch._C._set_only_lift_cpu_tensors(lifts)
            with higher_order.under(mode.fake), higher_order.under(mode), names:
                run()

        thread.run = run_inside
        start(thread)

    with replaced((threading.Thread, "start", start_inside)):
        yield


_run_backward = torch.autograd._engine_run_backward
MOVES = (
    *(torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.pin_memory),
    *(torch.Tensor.type_as, torch.Tensor.type),
)
# Attributes of torch.Tensor are C properties. A function mode gets their `__get__` and `__set__`.
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
PROPERTY = type(SET_DATA)
# `.device` and the like of a tensor that a transform of torch.func has wrapped. The wrapper is no
# FakeTensor, so the patched properties of FakeTensor do not apply.
ASKED = {
    getattr(torch.Tensor, name).__get__: answer.fget
    for name, answer in PLACE.items()
    if isinstance(answer, property)
}
FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
CTC_LOSS = {torch.nn.functional.ctc_loss, torch.ctc_loss}
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
RECURRENT |= {torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell}
CUDNN = (
    "recurrent layers run PyTorch's own operations; a card may use one kernel instead, such as "
    "cuDNN's, which keeps more or less"
)


class DeviceMoveMode(TorchFunctionMode):
    """Moves tensors between host and GPU, and notes the Python call in progress.

    mode: the GPU's dispatch mode, whose tracer, calls and reader this mode shares.
    """

    def __init__(self, mode: CardMode):
        super().__init__()
        self.tracer, self.calls, self.reader = mode.tracer, mode.calls, mode.reader
        # What `restore` gives back when the simulation ends.
        self._from_outside: list[tuple] = []  # (weak reference to a tensor, its data outside)
        self._buffers: list[tuple] = []  # (weak reference to a module, name, buffer outside)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if type(func) is PROPERTY:  # first, because it is the most frequent case
            if func == SET_DATA:
                return self.set_data(*args)
            return ASKED.get(func, func)(*args)
        if func in (torch.device, torch._C._nn._parse_to):  # these name a device, without a tensor
            if args and isinstance(args[0], int):
                args = (torch.device("cuda", args[0]), *args[1:])
            return func(*args, **kwargs)
        for kind in types:
            # An object that stands for a tensor, such as a lazily read weight of a checkpoint.
            if not issubclass(kind, torch.Tensor):
                with self._called_by_nobody():
                    return kind.__torch_function__(func, types, args, kwargs)
        if func in MOVES:
            return self._moved(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None:
            if isinstance(device, int):
                device = torch.device("cuda", device)
                kwargs = kwargs | {"device": device}
            is_cuda_device(device)  # raises for a second GPU
        if func is torch.tensor:
            args = (self._scalars_on_host(args[0]), *args[1:]) if args else args
        if func is torch.Tensor.is_pinned:
            return is_pinned(args[0])
        if func is torch.Tensor.new and on_card(args[0]) and not kwargs:
            return legacy_types.make(args[1:], args[0].dtype, CARD)
        if kwargs.get("pin_memory"):  # make the tensor without it, then mark it
            return pin(self.__torch_function__(func, types, args, kwargs | {"pin_memory": False}))
        if func in FROM_DATA:
            return self._made_from_data(func, args, kwargs)
        if func is torch.nn.functional.one_hot:
            with self._called_by_nobody():
                return _one_hot(*args, **kwargs)
        if func in CTC_LOSS:
            args, kwargs = self._with_lengths(args, kwargs)
        if func in RECURRENT and on_card(args[0]):
            self.tracer.assumptions[CUDNN] = None
            # oneDNN's CPU kernel would save less for the backward pass than a GPU does.
            with torch.backends.mkldnn.flags(enabled=False):
                return self._called(Call(args, kwargs), func, args, kwargs)
        # CUDA's autocast refuses it (aten/src/ATen/autocast_mode.h, `banned`), the CPU's does not.
        if func is torch.nn.functional.binary_cross_entropy and on_card(args[0]):
            if torch.is_autocast_enabled("cuda"):
                raise RuntimeError(refusals.UNSAFE_TO_AUTOCAST)
        # It returns padded data on the GPU and the lengths, int64, on the host.
        if func is torch._VF._pad_packed_sequence:
            return self._called(Call(args, kwargs, host_dtype=torch.int64), func, args, kwargs)
        return self._called(Call(args, kwargs, names_host(device)), func, args, kwargs)

    def _called(self, call, func, args, kwargs):
        # As `Calls.at_work`, inlined: a context manager here takes 5 % of a simulation's time.
        calls = self.calls
        before, calls.current = calls.current, call
        try:
            return func(*args, **kwargs)
        finally:
            calls.current = before

    def _scalars_on_host(self, data):
        """The data of `torch.tensor`, with ordinary tensors for scalars on the GPU."""
        if not isinstance(data, (list, tuple)):
            return data
        if isinstance(data[0] if data else None, (list, tuple)):
            return [self._scalars_on_host(row) for row in data]
        if not any(isinstance(value, FakeTensor) for value in data):
            return data
        return [self.reader.host_copy(x) if isinstance(x, FakeTensor) else x for x in data]

    def _made_from_data(self, func, args, kwargs):
        """`torch.tensor` and its like: make the tensor on the host, then move it.

        PyTorch moves such a tensor in C++, below this mode.
        """
        here = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad")}
        # Without function modes: the one of `torch.set_default_device` would ask CUDA for memory.
        with torch._C.DisableTorchFunction():
            made = func(*args, **here)
        device = kwargs.get("device")
        if func is torch.Tensor.new_tensor:
            device = device or device_of(args[0])
        elif device is None and is_cuda_device(torch.get_default_device()):
            device = CARD
        moved = self._moved(torch.Tensor.to, (made, device or device_of(made)), {})
        return moved.requires_grad_() if kwargs.get("requires_grad") else moved

    def _with_lengths(self, args, kwargs):
        """The arguments of a CTC loss, with its lengths as tensors on the GPU.

        The caller may give them as numbers, or as tensors on the host.
        """
        names = ("log_probs", "targets", "input_lengths", "target_lengths")
        named = dict(zip(names, args, strict=False)) | kwargs
        if not on_card(named["log_probs"]):
            return args, kwargs
        for name in names[2:]:
            named[name] = self.__torch_function__(
                torch.as_tensor, (), (named[name],), {"device": CARD}
            )
        return [named.pop(name) for name in names] + list(args[4:]), named

    # ------------------------------------------------------------------ below PyTorch's own calls

    @contextlib.contextmanager
    def _called_by_nobody(self):
        """Enter this mode, unless it is active, with no call in progress."""
        here = self in _get_current_function_mode_stack()
        with self.calls.at_work(None), contextlib.nullcontext() if here else self:
            yield

    def entered(self, function):
        """Wrap a function so that it runs under this mode."""

        def run(*args, **kwargs):
            with self._called_by_nobody():
                return function(*args, **kwargs)

        return run

    def hooks(self, init):
        """Wrap `saved_tensors_hooks.__init__` so that both hooks run under this mode."""

        def unpack_here(unpack):
            def run(packed):
                tensor = self.entered(unpack)(packed)
                if isinstance(tensor, torch.Tensor):
                    self.tracer.came_back(tensor)  # the hook may have moved or recomputed it
                return tensor

            return run

        def hooked(this, pack_hook, unpack_hook):
            init(this, self.entered(pack_hook), unpack_here(unpack_hook))

        return hooked

    # ------------------------------------------------------------------ moves

    def _moved(self, func, args, kwargs):
        """Carry out one of MOVES: `.to(...)`, `.cuda()`, `.type(...)`, `.pin_memory()`, ..."""
        tensor, *rest = args
        if func is torch.Tensor.pin_memory:
            return tensor if is_pinned(tensor) else pin(tensor.clone())
        if func is torch.Tensor.type:
            asked = legacy_types.parse(rest[0] if rest else kwargs.get("dtype"))
            if asked is None:  # `.type()` without a type returns the name of the tensor's type
                return func(*args, **kwargs)
            rest, kwargs = [asked[0] or device_of(tensor), asked[1]], {}
        if func is torch.Tensor.cpu:
            rest = [HOST]
        elif func is torch.Tensor.cuda:
            index = rest[0] if rest else kwargs.get("device")
            rest = [CARD if index is None else index]
            kwargs = {name: kwargs[name] for name in kwargs if name == "memory_format"}
        goal, options = _asked(rest, kwargs)
        there = device_of(tensor)
        of_bitsandbytes = bitsandbytes.is_to_be(tensor)
        # bitsandbytes quantizes a weight on its first move (`Params4bit.to`, `Int8Params.to`).
        if of_bitsandbytes and goal not in (None, META):
            if self.entered(bitsandbytes.quantize)(tensor, goal):
                self.tracer.see_parameter(tensor)
                return tensor
        call = Call((tensor,), {}, names_host=goal == HOST)
        # No move between host and GPU: PyTorch's own `.to` serves, for a dtype or from `meta`.
        if goal in (None, there) or "meta" in (goal.type, there.type):
            if goal not in (None, there):
                options["device"] = goal
            if not options:
                return tensor
            return self._called(call, torch.Tensor.to, (tensor,), options)
        options.pop("copy", None)  # a move always copies
        options["device"] = goal
        if of_bitsandbytes:
            data = self._called(call, _TO_COPY, (tensor.detach(),), options)
            return self.entered(bitsandbytes.moved)(tensor, data, goal)
        # To PyTorch both sides are CPU tensors, so its own derivative would not move the gradient.
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Move.apply(tensor, self, call, options)
        return self._called(call, _TO_COPY, (tensor,), options)

    def set_data(self, tensor: torch.Tensor, data) -> None:
        """`tensor.data = data`, even if only one of the two tensors is a fake one.

        A wrapper subclass, such as a DTensor, takes over the inner tensors of `data`.
        """
        comes = on_card(data) and not on_card(tensor)
        if _kind(tensor) == _kind(data) and not is_wrapper_subclass(type(tensor)):
            SET_DATA(tensor, data)
        else:  # PyTorch refuses data of another kind of tensor, so the tensors are swapped
            self._exchange(tensor, data)
        if comes and isinstance(tensor, torch.nn.Parameter):
            self.tracer.see_parameter(tensor)

    def _exchange(self, tensor, data) -> None:
        parameter = isinstance(tensor, torch.nn.Parameter)
        new = data.detach().requires_grad_(tensor.requires_grad)
        new = torch.nn.Parameter(new, tensor.requires_grad) if parameter else new
        # After the swap, `new` holds what `tensor` held before.
        if predates_context(tensor) and _kind(data) != "with data":
            self._from_outside.append((weakref.ref(tensor), new))
        _swap(tensor, new)

    def replaces(self, module, name, new) -> None:
        """Remember a buffer from outside, before `Module._apply` replaces it by `new`."""
        buffer = module._buffers[name]
        # A buffer that the host computes, as by `.half()`, has real values, and stays.
        if predates_context(buffer) and _kind(new) != "with data":
            self._buffers.append((weakref.ref(module), name, buffer))

    def restore(self) -> None:
        """Give tensors from outside the data that they had before they moved in.

        This includes tensors that the program has moved back to the host, as by `.cpu()`, because
        the values of that copy are stand-ins.
        """
        # Backwards: of a tensor that moved in twice, the data from before the first move win.
        for reference, name, buffer in reversed(self._buffers):
            module = reference()
            if module is not None and name in module._buffers:
                module._buffers[name] = buffer
        self._buffers.clear()
        for reference, data in reversed(self._from_outside):
            tensor = reference()
            if tensor is not None:
                _swap(tensor, data)
        self._from_outside.clear()


def _one_hot(tensor, num_classes=-1):
    """`one_hot` as CUDA runs it: zeros, and ones scattered into them.

    For a fake tensor PyTorch would compare with every class instead
    (aten/src/ATen/native/Onehot.cpp, `one_hot`).
    """
    classes = int(tensor.max()) + 1 if num_classes == -1 else num_classes
    zeros = tensor.new_zeros((*tensor.shape, classes))
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


class _Move(torch.autograd.Function):
    """A move between host and GPU, whose gradient moves the other way."""

    @staticmethod
    def forward(ctx, tensor, names, call, options):
        ctx.names, ctx.back = names, (device_of(tensor), tensor.dtype)
        return names._called(call, _TO_COPY, (tensor,), options)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.names._moved(torch.Tensor.to, (gradient, *ctx.back), {}), None, None, None


_TO_COPY = torch.ops.aten._to_copy.default


def _kind(tensor) -> str:
    """The kind of a tensor. PyTorch's `.data = ...` works between tensors of one kind."""
    if device_of(tensor).type == "meta":
        return "meta"
    return "without data" if is_simulated(tensor) else "with data"


def _swap(tensor, other) -> None:
    """Exchange the contents of two tensors; attributes that libraries set on `tensor` stay there.

    `torch.utils.swap_tensors` does the same, but refuses tensors that have weak references.
    """
    contents = FAKE_ATTRIBUTES
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper subclass: its inner tensors
        contents = contents.union(tensor.__tensor_flatten__()[0])
    inner: dict[str, object] = {}  # attributes that go with the contents
    noted: dict[str, object] = {}  # attributes of the user's and of libraries
    for name, value in tensor.__dict__.items():
        (inner if name in contents else noted)[name] = value
    kinds = type(tensor), type(other)
    bitsandbytes.set_type(tensor, kinds[1])
    bitsandbytes.set_type(other, kinds[0])
    tensor.__dict__, other.__dict__ = noted | other.__dict__, inner
    for name in getattr(type(tensor), "__slots__", ()):  # DTensor: its local tensor and its spec
        own, its = getattr(tensor, name), getattr(other, name)
        setattr(tensor, name, its)
        setattr(other, name, own)
    bitsandbytes.pass_for_its_class(tensor)
    torch._C._swap_tensor_impl(tensor, other)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name)
        if hooks is not None:  # setting them registers them with the new C++ tensor
            setattr(tensor, name, hooks)


# The instance attributes that PyTorch gives every fake tensor: fake_mode, _fake_device, ...
with FakeTensorMode():
    FAKE_ATTRIBUTES = {"_is_param", *torch.empty(0).__dict__}


def _asked(rest, kwargs) -> tuple[torch.device | None, dict]:
    """Parse the arguments of `.to(...)`: the device or None, and the options that are set.

    `non_blocking` is dropped, because nothing runs asynchronously here.
    """
    kwargs = dict(kwargs)
    first, *rest = [kwargs.pop("tensor"), *rest] if "tensor" in kwargs else rest or [None]
    if isinstance(first, torch.Tensor):  # .to(other)
        rest = [device_of(first), first.dtype, *rest]
    else:
        rest = [None, first, *rest] if isinstance(first, torch.dtype) else [first, *rest]
    options = dict(zip(TO, rest, strict=False)) | kwargs
    device = options.pop("device", None)
    options.pop("non_blocking", None)
    if device is not None:
        device = CARD if is_cuda_device(device) else torch.device(device)
    return device, {name: value for name, value in options.items() if value}


TO = ("device", "dtype", "non_blocking", "copy")  # the positional arguments of `.to`, in order


def _move_by(names):
    """The function by which `Module._apply` moves a parameter."""

    def move(parameter, function):
        applied = function(parameter)
        if applied is not parameter:
            names.set_data(parameter, applied)

    return move
