"""The dispatch mode of a simulated card: which operation runs there, and which on its host."""

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
    "what it gives depends on values that only a real card has. Do it on the host, with .cpu(), or "
    "without it"
)


class CardMode(TorchDispatchMode):
    """Runs each operation where its tensors lie, and tells the parts of a card what it does.

    fake: the mode of the tensors without data. tracer: enters what is made and what dies. calls:
    what Python code has called. steps, work: the optimizer steps, and what their operators do.
    reader: answers what code reads. kernels: take memory beside the tensors.
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
        """No guard against torch.compile around every operation, as in `memlab.trace.tracer`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return higher_order.run(self, func, args, kwargs or {})
        if func is torch.ops.prim.device.default:  # asked very often, touches no memory
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if any(map(is_wrapper_subclass, types)):
            return NotImplemented  # it comes again with the others
        kwargs = kwargs or {}
        tensors = tensors_in(args) if not kwargs else tensors_in((*args, *kwargs.values()))
        with (
            self.tracer.lock,  # the reader's threads
            torch._C.DisableTorchFunction(),
        ):  # questions below must not re-enter the function mode
            self.reader.waits.notice(sys._getframe(1))
            in_backward = self.tracer.phase() == Phase.BACKWARD
            device, dtype = kwargs.get("device"), kwargs.get("dtype")
            try:
                if self.calls.go_to_card(tensors, device, dtype, in_backward):
                    return self._on_card(func, args, kwargs, tensors)
                return self.host.run(func, args, kwargs, tensors)
            except NotImplementedError as error:
                if "storage" not in str(error):
                    raise
                raise NotSimulated(
                    f"{func} is not simulated: it takes or makes a sparse tensor. Use a dense one; "
                    "embeddings have sparse=False"
                ) from None

    def _on_card(self, func: Any, args: Any, kwargs: dict, tensors: list[torch.Tensor]) -> Any:
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
        refuse_two_devices(func, tensors)
        refusals.refuse(func, args)
        if func in dynamic_shapes.LARGEST:
            return self._by_values.run(func, args, kwargs, tensors)
        if func in (aten.equal.default, aten.allclose.default):
            return self.reader.compare(func, args, kwargs)
        self.steps.follow_by_hand(func, args, tensors)
        here, options = without_data(self.fake, args, kwargs, tensors)
        self._kernels.take_workspaces(func)
        self.tracer.before(func, here, options)
        try:
            out = func(*here, **options)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise NotSimulated(f"{func} is not simulated: {ONLY_A_CARD_KNOWS}") from None
        # Dropout takes its mask first: aten/src/ATen/native/cuda/Dropout.cu.
        mask_first = func is aten.native_dropout.default and isinstance(out, tuple)
        results = out[::-1] if mask_first else out
        self.tracer.after(func, here, results, by_autograd=self.calls.current is None)
        phase, stream = self.tracer.phase(), self.tracer.stream
        self.work.note(func, here, options, tensors, out, phase, stream)
        self._kernels.take_scratch(func, here, out)
        self._kernels.take_buffer(func, here)
        known_values.propagate(func, args, kwargs, out)
        return out
