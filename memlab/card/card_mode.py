"""The dispatch mode of the simulated GPU: it sends each operation to the GPU or to the host.

For an operation on the GPU, PyTorch's fake tensors supply the shapes. The mode reports the
operation to the tracer, and to the parts that log its work, its kernel's scratch memory, optimizer
steps and known values. Operations whose result PyTorch cannot know without data (`.item()`,
boolean masks, `torch.equal`) get an answer of the simulation's own, or raise NotSimulated.
"""

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.card import dynamic_shapes, known_values, refusals
from memlab.card.by_values import ByValues
from memlab.card.calls import Calls
from memlab.card.kernels import higher_order
from memlab.card.kernels.taken import KernelMemory
from memlab.card.on_host import Host, refuse_two_devices
from memlab.card.op_work import WorkLog
from memlab.card.placement import NotSimulated, without_data
from memlab.card.reading import Reader
from memlab.card.steps import Steps
from memlab.card.waiting import Waits
from memlab.footprint import Phase
from memlab.trace.tensors import is_wrapper_subclass, on_card, tensors_in
from memlab.trace.tracer import Tracer

aten = torch.ops.aten
ONLY_A_CARD_KNOWS = (
    "its result depends on values that only a real card has. Compute it on the host, with .cpu(), "
    "or do without it"
)


class CardMode(TorchDispatchMode):
    """Runs each operation where its tensors lie, and reports it to the parts of the simulation.

    fake: the mode of the tensors without data.
    tracer: logs every allocation and free.
    steps: the optimizer steps so far.
    work: FLOPs and bytes of the operators of each step.
    kernels: memory that kernels and libraries allocate for themselves.

    Its own attributes: `calls` (the Python call in progress), `reader` (answers code that reads
    values) and `host` (operations on host tensors).
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        fake: FakeTensorMode,
        tracer: Tracer,
        steps: Steps,
        work: WorkLog,
        kernels: KernelMemory,
    ):
        super().__init__()
        self.fake, self.tracer, self.calls = fake, tracer, Calls()
        self.steps, self.work = steps, work
        self.reader, self._kernels = Reader(Waits(tracer.assumptions, steps)), kernels
        self.host = Host(self, kernels)
        self._by_values = ByValues(self, kernels)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out `torch._disable_dynamo` around every operation: it costs time.

        `memlab.trace.tracer` does the same.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return higher_order.run(self, func, args, kwargs or {})
        if func is torch.ops.prim.device.default:  # `.device`: very frequent, touches no memory
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if any(map(is_wrapper_subclass, types)):
            return NotImplemented  # DTensor and the like dispatch again with their inner tensors
        kwargs = kwargs or {}
        tensors = tensors_in(args) if not kwargs else tensors_in((*args, *kwargs.values()))
        with (
            self.tracer.lock,  # the user's program may have threads
            torch._C.DisableTorchFunction(),  # queries below must not re-enter the function mode
        ):
            self.reader.waits.notice(sys._getframe(1))
            in_backward = self.tracer.phase() == Phase.BACKWARD
            device, dtype = kwargs.get("device"), kwargs.get("dtype")
            try:
                if self.calls.go_to_card(tensors, device, dtype, in_backward):
                    return self._on_card(func, args, kwargs, tensors)
                return self.host.run(func, args, kwargs, tensors)
            except NotImplementedError as error:
                # A sparse tensor has no storage: PyTorch says "Cannot access storage of ...".
                if "storage" not in str(error):
                    raise
                raise NotSimulated(
                    f"{func} is not simulated: it takes or makes a sparse tensor. Use a dense one; "
                    "embeddings take sparse=False"
                ) from None

    def _on_card(self, func: Any, args: Any, kwargs: dict, tensors: list[torch.Tensor]) -> Any:
        # First the operations that read values: `.item()`, copies to the host, and operations whose
        # output shape follows from values. PyTorch's fake tensors refuse them.
        if func is aten._local_scalar_dense.default:
            return self.reader.item(args[0])
        if func is aten.copy_.default and not on_card(args[0]):
            return self.host.write(*args[:2])
        if func is aten.masked_select.default:
            return self._by_values.select_by_mask(*args)
        if func is aten._pack_padded_sequence.default:
            return self._by_values.pack(*args)
        if func._opname in dynamic_shapes.BY_MASK:
            args = self._by_values.without_masks(*args)
        # CUDA's errors come before anything is allocated.
        refuse_two_devices(func, tensors)
        refusals.refuse(func, args)
        if func in dynamic_shapes.LARGEST:
            return self._by_values.run(func, args, kwargs, tensors)
        if func in (aten.equal.default, aten.allclose.default):
            return self.reader.compare(func, args, kwargs)
        self.steps.follow_by_hand(func, args, tensors)
        # Host tensors with data, such as 0-dim numbers, become fake ones for the shape inference.
        here, options = without_data(self.fake, args, kwargs, tensors)
        self._kernels.take_workspaces(func)
        self.tracer.before(func, here, options)
        try:
            out = func(*here, **options)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise NotSimulated(f"{func} is not simulated: {ONLY_A_CARD_KNOWS}") from None
        # The order of the results is the order of their allocations, except here: dropout
        # allocates its mask before its output (aten/src/ATen/native/cuda/Dropout.cu, dropout_cuda).
        mask_first = func is aten.native_dropout.default and isinstance(out, tuple)
        results = out[::-1] if mask_first else out
        # No Python call in progress: this may be one of autograd's own derivatives.
        self.tracer.after(func, here, results, by_autograd=self.calls.current is None)
        phase, stream = self.tracer.phase(), self.tracer.stream
        self.work.note(func, here, options, tensors, out, phase, stream)
        self._kernels.take_scratch(func, here, out)
        self._kernels.take_buffer(func, here)
        # Not `here`: the values of host tensors are gone in it.
        known_values.propagate(func, args, kwargs, out)
        return out
