"""Code written for CUDA on a machine without: its names, and moves between host and card."""

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
from memlab.card.placement import (
    CARD,
    HOST,
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

# The module: the name torch.optim.optimizer is taken away from the package after its import.
optimizers = importlib.import_module("torch.optim.optimizer")


@contextlib.contextmanager
def cuda_code(mode: CardMode):
    """Let code written for CUDA run, and tell a card's mode what Python calls."""
    names = DeviceMoveMode(mode)
    types = [*optimizers._foreach_supported_types, FakeTensor]
    init_hooks = torch.autograd.graph.saved_tensors_hooks.__init__
    rows = (
        *AUTOCAST,
        (optimizers, "_foreach_supported_types", types),
        (torch.utils._foreach_utils, "_foreach_supported_types", types),
        # Of some results the strides follow the device: those of an SVD, of convolutions.
        (torch._meta_registrations, "device_hint", lambda tensor: "cuda"),
        (torch.nn.Module, "_apply", apply_by(_move_by(names), names.replaces)),
        (torch._C, "_InferenceMode", _without_gradients),
        (torch, "set_default_tensor_type", _set_default_tensor_type),
        # PyTorch calls these from within, where no mode is.
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
    """`torch.inference_mode`, as `torch.no_grad`, which takes the same memory.

    PyTorch gives a mode such as the tracer operators before they are taken apart in inference mode.
    """
    return torch.set_grad_enabled(not mode)


def _set_default_tensor_type(kind) -> None:
    parsed = legacy_types.parse(kind)
    if parsed is None:
        raise TypeError(f"{kind!r} is no type of tensors")
    device, dtype = parsed
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device == HOST else device)


@contextlib.contextmanager
def threads_come_along(mode: CardMode, names):
    """Let the threads that are started inside follow these modes: PyTorch keeps them by thread."""
    start = threading.Thread.start

    def start_inside(thread):
        run, lifts = thread.run, torch._C._only_lift_cpu_tensors()

        def run_inside():
            torch._C._set_only_lift_cpu_tensors(lifts)  # torch.tensor(..., device="cuda")
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
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a property of C
PROPERTY = type(SET_DATA)
# What a fake tensor answers by itself, asked of one that a transform of torch.func has wrapped.
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
    "recurrent layers: PyTorch's own operations, where a card may take one kernel, such as "
    "cuDNN's, which keeps more or less"
)


class DeviceMoveMode(TorchFunctionMode):
    """Moves tensors between host and card, and notes what Python calls."""

    def __init__(self, mode: CardMode):
        super().__init__()
        self.tracer, self.calls, self.reader = mode.tracer, mode.calls, mode.reader
        self._from_outside: list[tuple] = []  # (what moved in, its data)
        self._buffers: list[tuple] = []  # (the module, the name, the buffer)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if type(func) is PROPERTY:  # a property; asked very often
            if func == SET_DATA:
                return self.set_data(*args)
            return ASKED.get(func, func)(*args)
        if func in (torch.device, torch._C._nn._parse_to):  # a name alone makes no tensor
            if args and isinstance(args[0], int):
                args = (torch.device("cuda", args[0]), *args[1:])
            return func(*args, **kwargs)
        for kind in types:
            if not issubclass(kind, torch.Tensor):  # what answers for a tensor, such as a lazy one
                with self._called_by_nobody():
                    return kind.__torch_function__(func, types, args, kwargs)
        if func in MOVES:
            return self._moved(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None:
            if isinstance(device, int):
                device = torch.device("cuda", device)
                kwargs = kwargs | {"device": device}
            is_cuda_device(device)  # or refuses
        if func is torch.tensor:
            args = (self._scalars_on_host(args[0]), *args[1:]) if args else args
        if func is torch.Tensor.is_pinned:
            return is_pinned(args[0])
        if func is torch.Tensor.new and on_card(args[0]) and not kwargs:
            return legacy_types.make(args[1:], args[0].dtype, CARD)
        if kwargs.get("pin_memory"):
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
            with torch.backends.mkldnn.flags(enabled=False):  # the host's kernel keeps less
                return self._called(Call(args, kwargs), func, args, kwargs)
        if func is torch.nn.functional.binary_cross_entropy and on_card(args[0]):
            if torch.is_autocast_enabled("cuda"):
                raise RuntimeError(refusals.UNSAFE_TO_AUTOCAST)
        if func is torch._VF._pad_packed_sequence:  # of its lengths the host makes a tensor
            return self._called(Call(args, kwargs, host_dtype=torch.int64), func, args, kwargs)
        return self._called(Call(args, kwargs, names_host(device)), func, args, kwargs)

    def _called(self, call, func, args, kwargs):
        calls = self.calls  # as `at_work`, which would take a twentieth of a simulation's time
        before, calls.current = calls.current, call
        try:
            return func(*args, **kwargs)
        finally:
            calls.current = before

    def _scalars_on_host(self, data):
        """What a tensor is made of, with ordinary tensors for the numbers on the card."""
        if not isinstance(data, (list, tuple)):
            return data
        if isinstance(data[0] if data else None, (list, tuple)):
            return [self._scalars_on_host(row) for row in data]
        if not any(isinstance(value, FakeTensor) for value in data):
            return data
        return [self.reader.host_copy(x) if isinstance(x, FakeTensor) else x for x in data]

    def _made_from_data(self, func, args, kwargs):
        """What PyTorch makes of numbers and arrays on the host, and moves by itself."""
        here = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad")}
        with torch._C.DisableTorchFunction():  # or a default device would be asked for memory
            made = func(*args, **here)
        device = kwargs.get("device")
        if func is torch.Tensor.new_tensor:
            device = device or device_of(args[0])
        elif device is None and is_cuda_device(torch.get_default_device()):
            device = CARD
        moved = self._moved(torch.Tensor.to, (made, device or device_of(made)), {})
        return moved.requires_grad_() if kwargs.get("requires_grad") else moved

    def _with_lengths(self, args, kwargs):
        """The arguments of a CTC loss, whose lengths may be numbers or lie on the host."""
        names = ("log_probs", "targets", "input_lengths", "target_lengths")
        named = dict(zip(names, args, strict=False)) | kwargs
        if not on_card(named["log_probs"]):
            return args, kwargs
        for name in names[2:]:
            named[name] = self.__torch_function__(
                torch.as_tensor, (), (named[name],), {"device": CARD}
            )
        return [named.pop(name) for name in names] + list(args[4:]), named

    # ------------------------------------------------------------------ where no mode is

    @contextlib.contextmanager
    def _called_by_nobody(self):
        """Under this mode, as where Python code stands by itself."""
        here = self in _get_current_function_mode_stack()
        with self.calls.at_work(None), contextlib.nullcontext() if here else self:
            yield

    def entered(self, function):
        """The function, run under this mode."""

        def run(*args, **kwargs):
            with self._called_by_nobody():
                return function(*args, **kwargs)

        return run

    def hooks(self, init):
        """`saved_tensors_hooks.__init__`, whose hooks run under this mode."""

        def unpack_here(unpack):
            def run(packed):
                tensor = self.entered(unpack)(packed)
                if isinstance(tensor, torch.Tensor):
                    self.tracer.came_back(tensor)
                return tensor

            return run

        def hooked(this, pack_hook, unpack_hook):
            init(this, self.entered(pack_hook), unpack_here(unpack_hook))

        return hooked

    # ------------------------------------------------------------------ moves

    def _moved(self, func, args, kwargs):
        """`.cpu()`, `.cuda()`, `.to(...)`, `.type(...)`, `.type_as(...)` and `.pin_memory()`."""
        tensor, *rest = args
        if func is torch.Tensor.pin_memory:
            return tensor if is_pinned(tensor) else pin(tensor.clone())
        if func is torch.Tensor.type:
            asked = legacy_types.parse(rest[0] if rest else kwargs.get("dtype"))
            if asked is None:  # its name is asked for
                return func(*args, **kwargs)
            rest, kwargs = [asked[0] or device_of(tensor), asked[1]], {}
        if func is torch.Tensor.cpu:
            rest, kwargs = [HOST], {}
        elif func is torch.Tensor.cuda:
            index = rest[0] if rest else kwargs.get("device")
            rest, kwargs = [CARD if index is None else index], {}
        goal, options = _asked(rest, kwargs)
        there = device_of(tensor)
        if goal == CARD and bitsandbytes.is_to_be(tensor):
            self.entered(bitsandbytes.quantize)(tensor, CARD)
            self.tracer.see_parameter(tensor)
            return tensor
        call = Call((tensor,), {}, names_host=goal == HOST)
        if goal in (None, there) or "meta" in (goal.type, there.type):
            if goal not in (None, there):
                options["device"] = goal
            if not options:
                return tensor
            return self._called(call, torch.Tensor.to, (tensor,), options)
        options.pop("copy", None)
        options["device"] = goal
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Move.apply(tensor, self, call, options)
        return self._called(call, _TO_COPY, (tensor,), options)

    def set_data(self, tensor: torch.Tensor, data) -> None:
        """`tensor.data = data`, also where one holds data and the other does not.

        What is made of other tensors, as DTensor is of this rank's part, gets those of the other.
        """
        comes = on_card(data) and not on_card(tensor)
        if _kind(tensor) == _kind(data) and not is_wrapper_subclass(type(tensor)):
            SET_DATA(tensor, data)
        else:
            self._exchange(tensor, data)
        if comes and isinstance(tensor, torch.nn.Parameter):
            self.tracer.see_parameter(tensor)

    def _exchange(self, tensor, data) -> None:
        parameter = isinstance(tensor, torch.nn.Parameter)
        new = data.detach().requires_grad_(tensor.requires_grad)
        new = torch.nn.Parameter(new, tensor.requires_grad) if parameter else new
        if predates_context(tensor):
            self._from_outside.append((weakref.ref(tensor), new))
        _swap(tensor, new)

    def replaces(self, module, name, buffer) -> None:
        """A module gets another buffer."""
        if predates_context(buffer):
            self._buffers.append((weakref.ref(module), name, buffer))

    def restore(self) -> None:
        """What had data before it moved has them again."""
        for reference, name, buffer in reversed(self._buffers):
            module = reference()
            if module is not None and isinstance(module._buffers.get(name), FakeTensor):
                module._buffers[name] = buffer
        self._buffers.clear()
        for reference, data in reversed(self._from_outside):
            tensor = reference()
            if isinstance(tensor, FakeTensor):
                _swap(tensor, data)
        self._from_outside.clear()


def _one_hot(tensor, num_classes=-1):
    """Onehot.cpp, `one_hot`; a fake tensor would be compared with every class."""
    classes = int(tensor.max()) + 1 if num_classes == -1 else num_classes
    zeros = tensor.new_zeros((*tensor.shape, classes))
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


class _Move(torch.autograd.Function):
    """A move between host and card, whose gradient goes the other way."""

    @staticmethod
    def forward(ctx, tensor, names, call, options):
        ctx.names, ctx.back = names, (device_of(tensor), tensor.dtype)
        return names._called(call, _TO_COPY, (tensor,), options)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.names._moved(torch.Tensor.to, (gradient, *ctx.back), {}), None, None, None


_TO_COPY = torch.ops.aten._to_copy.default


def _kind(tensor) -> str:
    """Tensors of one kind can take each other's data."""
    if device_of(tensor).type == "meta":
        return "meta"
    return "without data" if isinstance(tensor, FakeTensor) else "with data"


def _swap(tensor, other) -> None:
    """Let two tensors exchange what they are; what others have noted on them stays.

    `torch.utils.swap_tensors` does the same and refuses tensors that something refers to weakly.
    """
    inner: dict[str, object] = {}
    noted: dict[str, object] = {}
    for name, value in tensor.__dict__.items():
        (inner if name in FAKE_ATTRIBUTES else noted)[name] = value
    kinds = type(tensor), type(other)
    bitsandbytes.set_type(tensor, kinds[1])
    bitsandbytes.set_type(other, kinds[0])
    tensor.__dict__, other.__dict__ = noted | other.__dict__, inner
    for name in getattr(type(tensor), "__slots__", ()):  # what a DTensor is made of
        own, its = getattr(tensor, name), getattr(other, name)
        setattr(tensor, name, its)
        setattr(other, name, own)
    torch._C._swap_tensor_impl(tensor, other)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name)
        if hooks is not None:  # autograd notes them on what was exchanged
            setattr(tensor, name, hooks)


with FakeTensorMode():
    FAKE_ATTRIBUTES = {"_is_param", *torch.empty(0).__dict__}


def _asked(rest, kwargs) -> tuple[torch.device | None, dict]:
    """What `.to(...)` was asked for: a device or None, and the options that matter here."""
    kwargs = dict(kwargs)
    first, *rest = [kwargs.pop("tensor"), *rest] if "tensor" in kwargs else rest or [None]
    if isinstance(first, torch.Tensor):
        rest = [device_of(first), first.dtype, *rest]
    else:
        rest = [None, first, *rest] if isinstance(first, torch.dtype) else [first, *rest]
    options = dict(zip(TO, rest, strict=False)) | kwargs
    device = options.pop("device", None)
    options.pop("non_blocking", None)
    if device is not None:
        device = CARD if is_cuda_device(device) else torch.device(device)
    return device, {name: value for name, value in options.items() if value}


TO = ("device", "dtype", "non_blocking", "copy")  # in the order in which `.to` takes them


def _move_by(names):
    """Moves a parameter of a module."""

    def move(parameter, function):
        if on_card(parameter) and bitsandbytes.is_to_be(parameter):
            return
        applied = function(parameter)
        if applied is not parameter:
            names.set_data(parameter, applied)

    return move
