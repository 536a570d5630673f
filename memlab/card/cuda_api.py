"""What `torch.cuda` and `torch.accelerator` answer while a GPU is simulated.

PyTorch's own Python functions run wherever possible. The simulation replaces the functions of
`torch._C` below them, which would ask the driver or the allocator, and a few names of `torch.cuda`
itself. Names without an answer raise NotSimulated (`NOT_SIMULATED`).

Known limitations: streams are only names for memory, and nothing takes time. The profiler follows
this machine instead of the GPU.
"""

import contextlib
import functools
import itertools
import os
import sys
from typing import Any

import torch
from torch.utils._cpp_extension_versioner import ExtensionVersioner
from transformers.utils import import_utils

from memlab.card import device_properties, legacy_types
from memlab.card.device_properties import DeviceProperties
from memlab.card.kernels import higher_order, torchao
from memlab.card.placement import ONE_CARD, NotSimulated, is_cuda_device
from memlab.trace.patches import replaced

# Name -> why it is refused, or what to do instead.
NOT_SIMULATED = {
    "torch.cuda.CUDAGraph": "CUDA graphs have memory pools of their own",
    "torch.cuda.graph": "CUDA graphs have memory pools of their own",
    "torch.cuda.make_graphed_callables": "CUDA graphs have memory pools of their own",
    "torch.cuda.MemPool": "only one memory pool is simulated",
    "torch.cuda.ExternalStream": "only PyTorch's own streams are simulated",
    "torch.cuda.change_current_allocator": "only PyTorch's own allocator is simulated",
    "torch.cuda.memory.change_current_allocator": "only PyTorch's own allocator is simulated",
    "torch.cuda.caching_allocator_alloc": "make a tensor of bytes instead",
    "torch.cuda.memory.caching_allocator_alloc": "make a tensor of bytes instead",
    "torch.cuda.utilization": "nothing takes time in a simulation",
    "torch.cuda.temperature": "nothing takes time in a simulation",
    "torch.cuda.power_draw": "nothing takes time in a simulation",
    "torch.cuda.clock_rate": "nothing takes time in a simulation",
    "torch.profiler.profile.export_memory_timeline": "the profiler sees only the host here: "
    "`memlab run --snapshot`, or torch.cuda.memory._dump_snapshot, has each tensor of the card",
    "torch.export.export": "it traces a model without data: export after the simulation",
    "torch.onnx.export": "it traces a model: export after the simulation",
    "torch.nested.nested_tensor": "its memory depends on its lengths: pad the sequences instead",
    "torch.nested.as_nested_tensor": "its memory depends on its lengths: pad instead",
    "torch.nested.nested_tensor_from_jagged": "its memory depends on its lengths: pad instead",
}


@contextlib.contextmanager
def cuda_answers(tracer, snapshot, ranks=1, compile_eagerly=False, reads_environment=True):
    """Let `torch.cuda` and `torch.accelerator` describe the GPU that `tracer` simulates.

    snapshot: a function that returns what `torch.cuda.memory._snapshot()` returns.
    ranks: how many GPUs the machine has.
    compile_eagerly: whether code that would be compiled runs eagerly.
    reads_environment: whether environment variables set the allocator.
    """
    memory = tracer.allocator
    memory.reads_environment, memory.assumptions = reads_environment, tracer.assumptions
    streams = Streams(tracer)
    with contextlib.ExitStack() as stack:
        thread = stack.enter_context(higher_order.functions_as_operators(compile_eagerly))
        for target, answers in (
            (torch.autograd.profiler.profile, {"__init__": _profile(tracer.assumptions)}),
            (torch.cuda, legacy_types.TYPES | _of_the_card(tracer, streams, ranks)),
            (torch.compiler, {"cudagraph_mark_step_begin": _nothing}),
            *device_properties.answers(tracer.allocator.gpu),
            (torch._C, _of_the_driver(tracer, snapshot, ranks, streams)),
            (torch, {"compile": _compile(tracer, compile_eagerly, thread), "Generator": Generator}),
            (torch, {"Stream": streams.kind, "Event": streams.event}),
            # Recurrent layers then run as PyTorch's own operations.
            (torch.backends.cudnn, {"is_acceptable": lambda tensor: False}),
            (torch.Tensor, {"record_stream": _nothing}),
            # DataParallel over one GPU moves the batch there and runs the module.
            (torch.nn.parallel.comm, {"scatter": lambda tensor, *where: (tensor.to("cuda"),)}),
            (torch.nn.parallel._functions, {"_get_stream": lambda device: None}),
            (ExtensionVersioner, {"bump_version_if_changed": _extension}),
        ):
            # create=True, because some of these names exist in CUDA builds only.
            rows = [(target, name, value) for name, value in answers.items()]
            stack.enter_context(replaced(*rows, create=True))
        stack.enter_context(replaced(*refusals(NOT_SIMULATED)))
        stack.enter_context(libraries_look_again())
        yield torch.device("cuda", 0)


def _nothing(*args, **kwargs):
    """Replaces functions that have nothing to do here: no driver, no other process, no waiting."""


def _of_the_card(tracer, streams, ranks) -> dict:
    """Replacements for names of `torch.cuda` itself."""

    def free_and_total(device=None):
        only_card(device)
        return tracer.allocator.free_and_total()

    properties = DeviceProperties(tracer.allocator.gpu, tracer.allocator)
    return {
        "_initialized": True,  # `_lazy_init` would call the driver
        "_cached_device_count": None,
        "_cudart": device_properties.runtime(free_and_total),
        "_get_device_properties": lambda device: properties,
        "_check_bf16_tensor_supported": lambda device: True,  # older GPUs emulate bf16
        "_exchange_device": _select,  # for `torch.cuda.device`, a context manager
        "_maybe_exchange_device": _maybe_select,
        "default_generators": tuple(torch.Generator() for _ in range(ranks)),
        "Stream": streams.kind,
        "current_stream": streams.current,
        "default_stream": default_stream,
        "set_stream": streams.choose,
        "Event": streams.event,
        "is_current_stream_capturing": lambda: False,
        "device_memory_used": lambda device=None: tracer.allocator.used(),
    }


def _of_the_driver(tracer, snapshot, ranks, streams) -> dict:
    """Replacements for the functions of `torch._C` that ask the driver or the allocator."""
    memory = tracer.allocator
    return {
        "_cuda_getDeviceCount": lambda: ranks,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": only_card,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_memoryStats": lambda device: memory.stats(),
        "_cuda_emptyCache": tracer.empty_cache,
        "_cuda_resetPeakMemoryStats": lambda device: tracer.reset_peak(),
        "_cuda_resetAccumulatedMemoryStats": lambda device: memory.reset_accumulated_stats(),
        "_cuda_memorySnapshot": lambda pool: snapshot(),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_getCurrentBlasHandle": lambda: 1,  # any number: nothing dereferences it
        "_cuda_attach_out_of_memory_observer": memory.observers.append,
        "_cuda_setMemoryFraction": lambda fraction, device: memory.set_fraction(fraction),
        "_cuda_getMemoryFraction": lambda device: memory.fraction,
        "_cuda_hostMemoryStats": dict,  # pinned host memory is not followed
        "_cuda_CUDAAllocator_AllocatorState": object,  # a class that inductor's CUDA graphs name
        **dict.fromkeys(NOTHING_TO_DO.split(), _nothing),
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_setDeviceIndex": only_card,
        "_accelerator_getStream": streams.current,
        "_accelerator_setStream": streams.choose,
        "_accelerator_synchronizeDevice": only_card,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": tracer.empty_cache,
        "_accelerator_getDeviceStats": lambda device: memory.stats(),
        "_accelerator_resetPeakStats": lambda device: tracer.reset_peak(),
        "_accelerator_resetAccumulatedStats": lambda device: memory.reset_accumulated_stats(),
        "_accelerator_setAllocatorSettings": memory.change_settings,
        "_accelerator_getAllocatorSettings": lambda: memory.settings,
        "_accelerator_getMemoryInfo": lambda device: memory.free_and_total(),
    }


# Memory history is recorded in any case, and a snapshot can be taken at any time.
NOTHING_TO_DO = (
    "_cuda_synchronize _cuda_set_sync_debug_mode _cuda_ipc_collect _cuda_sleep "
    "_cuda_resetAccumulatedHostMemoryStats _cuda_resetPeakHostMemoryStats "
    "_cuda_record_memory_history _cuda_record_memory_history_legacy _set_cached_tensors_enabled"
)


def refusals(names: dict[str, str]):
    """Rows for `replaced`: each name becomes one that raises NotSimulated with its reason."""
    for path, why in names.items():
        *modules, name = path.split(".")[1:]
        target = functools.reduce(getattr, modules, torch)
        refused, original = refuse(path, why), getattr(target, name)
        # A class must stay a class, for isinstance checks and annotations. A class of Python keeps
        # its attributes too, and refuses in `__init__`.
        plain = isinstance(original, type) and original.__new__ is object.__new__
        if plain and "__init__" in vars(original):
            yield original, "__init__", refused
            continue
        if isinstance(original, type):  # a class of C++: a subclass that cannot be instantiated
            refused = type(name, (original,), {"__new__": refused})
        yield target, name, refused


def only_card(device=None) -> None:
    """Raise NotSimulated for any device but cuda:0. None and negative numbers pass."""
    if device is None or (isinstance(device, int) and device < 1):
        return
    if not is_cuda_device(device):
        raise NotSimulated(f"device is {str(device)!r}: {ONE_CARD}")


def _select(index) -> int:
    """Select a device, which must be 0 or negative (no change); returns the previous one, 0."""
    only_card(index)
    return 0


def _maybe_select(index) -> int:
    """As `_select`. torch.compile keeps one handler per function, so this must be another one."""
    return _select(index)


def refuse(name, why):
    """A function that raises NotSimulated, with a name and a reason."""

    def refused(*args, **kwargs):
        raise NotSimulated(f"{name} is not simulated: {why}")

    return refused


_bump_version: Any = ExtensionVersioner.bump_version_if_changed


def _extension(self, name, *args, with_cuda=False, **kwargs):
    """`ExtensionVersioner.bump_version_if_changed`, which PyTorch calls before it builds.

    Raises NotSimulated for an extension with CUDA kernels.
    """
    if with_cuda:
        refuse(
            f"the CUDA extension {name}",
            "its kernels can be built and run on a real card only. Run the script without it",
        )()
    return _bump_version(self, name, *args, with_cuda=with_cuda, **kwargs)


_NO_COMPILE = refuse(
    "torch.compile",
    "compiled graphs plan their memory differently. compile_eagerly=True, or memlab run "
    "--compile-eagerly, runs the code uncompiled, which may need more than compiled code, or less",
)
EAGERLY = (
    "torch.compile: the code ran uncompiled. Compiled code mostly needs less, but this is no "
    "bound: a published compiled step took 5 % more than it does here"
)


def _compile(tracer, eagerly, thread):
    """`torch.compile`, which runs code eagerly or refuses to.

    Code runs eagerly if PyTorch's own switches say so, or if `eagerly` is set. flex_attention and
    torchao's step are replaced by models of their compiled form. Otherwise a module is refused at
    once, and a function when it is called.
    """

    def compiled(model=None, *, backend="inductor", disable=False, **settings):
        if model is None:  # used as a decorator with arguments
            return lambda function: compiled(function, backend=backend, disable=disable)
        # backend="eager", or the backend function of that name, with which torch.cond and eager
        # flex_attention wrap themselves.
        eager = "eager" in (backend, getattr(backend, "__name__", None))
        if disable or eager or _is_switched_off():
            return model
        own = higher_order.compiled_form(model, thread, tracer.assumptions)
        if own is not None:
            return own
        if torchao.is_its_step(model):
            tracer.assumptions[torchao.COMPILED] = None
            return torchao.fused_step
        if eagerly:
            tracer.assumptions[EAGERLY] = None
            return model
        if isinstance(model, torch.nn.Module):
            _NO_COMPILE()
        # Libraries decorate functions at import that they may never call.
        return _NO_COMPILE

    return compiled


def _is_switched_off() -> bool:
    """Whether PyTorch's own settings turn torch.compile off, without importing its compiler."""
    settings = sys.modules.get("torch._dynamo.config")
    names = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    return getattr(settings, "disable", False) or any(os.environ.get(n) == "1" for n in names)


_original_profile = torch.autograd.profiler.profile.__init__
PROFILED = "torch.profiler: no times of the card, no shapes; its times are those of this machine"
NO_BYTES = "torch.profiler: profile_memory is ignored, because it would show no bytes of the card"


def _profile(assumptions):
    """`torch.autograd.profiler.profile.__init__`, reduced to what it can see on the host.

    Shapes and memory are switched off, because the profiler would keep every tensor it has seen.
    """

    def start(self, *args, **settings):
        assumptions[PROFILED] = None
        if settings.get("profile_memory"):
            assumptions[NO_BYTES] = None
        settings.pop("use_cuda", None)  # the old name of use_device
        without = {"use_device": None, "record_shapes": False, "profile_memory": False}
        _original_profile(self, *args, **settings | without | {"with_flops": False})

    return start


_OriginalGenerator = torch.Generator


class _AnyGenerator(type):
    # The generators that `Generator` makes are PyTorch's own, of another class.
    def __instancecheck__(cls, instance):
        return isinstance(instance, _OriginalGenerator)


class Generator(metaclass=_AnyGenerator):
    """`torch.Generator`, also for "cuda": a CPU generator, because drawn numbers have no value."""

    def __new__(cls, device="cpu"):
        if torch.device(device).type == "cuda":
            only_card(device)
        return _OriginalGenerator()


class Stream:
    """A CUDA stream. Nothing ever waits in it, but its allocations come from its own blocks.

    The caching allocator reuses a block in the stream that allocated it only, so a tensor's stream
    decides which freed memory it can take.
    """

    device = torch.device("cuda", 0)
    device_index, device_type = 0, 1  # 1 is c10::DeviceType::CUDA
    numbers = itertools.repeat(0)  # of the default stream; each GPU counts its own from 1

    def __init__(self, device=None, priority=0, **settings):
        only_card(device)
        self.priority = priority
        self.stream_id = self.cuda_stream = next(self.numbers)

    def __enter__(self):
        self._inside = torch.cuda.stream(self)  # type: ignore[arg-type]
        self._inside.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._inside.__exit__(*error)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5  # least and greatest, on GPUs since Volta

    synchronize = wait_stream = wait_event = _nothing

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event=None):
        return event or Event()


_DEFAULT = Stream()


def default_stream(device=None) -> Stream:
    only_card(device)
    return _DEFAULT


class Streams:
    """The current stream of one GPU; the tracer notes its number with each allocation.

    kind, event: the classes `Stream` and `Event` of this GPU.
    """

    def __init__(self, tracer):
        self._tracer, self._chosen = tracer, _DEFAULT
        self.kind = type("Stream", (Stream,), {"numbers": itertools.count(1)})
        self.event = type("Event", (Event,), {"assumptions": tracer.assumptions})

    def current(self, device=None) -> Stream:
        only_card(device)
        return self._chosen

    def choose(self, stream) -> None:
        if stream is not None:
            self._tracer.stream, self._chosen = stream.stream_id, stream


EVENT_TIMES = "torch.cuda.Event.elapsed_time: returns 1 ms for every time on the card"


class Event:
    """A CUDA event. Nothing takes time here, so any two events are 1 ms apart.

    assumptions: a dict that gets a line when a time is asked for.
    """

    assumptions: dict = {}

    __init__ = record = wait = synchronize = _nothing

    def elapsed_time(self, end) -> float:
        self.assumptions[EVENT_TIMES] = None
        return 1.0

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def libraries_look_again():
    """Let transformers and accelerate detect CUDA again, inside the block and after it.

    transformers caches its `is_..._available` functions, and accelerate keeps its states for the
    life of the process. Accelerate's states from before the block come back afterwards.
    """
    before = [dict(shared) for shared in _accelerates_memory()]
    _forget()
    try:
        yield
    finally:
        _forget()
        for shared, values in zip(_accelerates_memory(), before, strict=False):
            shared.update(values)


def _accelerates_memory() -> list[dict]:
    """The shared dicts of accelerate's state classes; none if accelerate is not imported."""
    state = sys.modules.get("accelerate.state")
    kinds = ("PartialState", "AcceleratorState", "GradientState") if state else ()
    return [getattr(state, kind)._shared_state for kind in kinds]


def _forget() -> None:
    for shared in _accelerates_memory():
        shared.clear()
    for name, value in vars(import_utils).items():
        if name.startswith("is_") and hasattr(value, "cache_clear"):
            value.cache_clear()
