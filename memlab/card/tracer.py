"""What is on the card and what on its host, and what CUDA's libraries take beside the tensors."""

import functools
import sys
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from memlab.card import dynamic_shapes, known_values, refusals
from memlab.card.by_values import ByValues
from memlab.card.kernels import composites, higher_order, scratch
from memlab.card.kernels.rules import RULES
from memlab.card.memory import CardMemory
from memlab.card.on_host import OnHost, refuse_two_devices
from memlab.card.op_work import WorkLog
from memlab.card.placement import (
    NotSimulated,
    is_cuda_device,
    is_on_host,
    on_card,
    place_on_cpu,
)
from memlab.card.waiting import Waits
from memlab.footprint import Category, Phase
from memlab.gpus import GPU
from memlab.trace.events import Marker
from memlab.trace.ledger import Storage
from memlab.trace.reductions import UNLIMITED
from memlab.trace.tensors import is_gathered, is_wrapper_subclass, tensors_in
from memlab.trace.tracer import Tracer
from memlab.trace.user_frames import line_at_work

aten = torch.ops.aten


class Call(NamedTuple):
    """What Python code called: its arguments, and whether it named the host as the device.

    host_dtype: what it makes of this dtype is for the host, beside what it makes for the card.
    """

    args: tuple
    kwargs: dict
    names_host: bool = False
    host_dtype: torch.dtype | None = None


class _Thread(threading.local):
    """call: what Python code has called in this thread; None in the autograd engine."""

    call: Call | None = None


class CardTracer(OnHost, ByValues, Tracer):
    """A tracer of one card: it knows the host's tensors and takes the libraries' workspaces.

    rules: which of `memlab.card.kernels.rules.RULES` hold; met_rules: those that were at work.
    script: whose lines are noted with what they make; files beside it count as its own.
    assumptions: what stands in for values that only a real card has, where a shape follows them.
    mode: that of the tensors without data, once there is one.
    """

    mode: FakeTensorMode

    def __init__(self, gpu: GPU, rules=frozenset(RULES), script: Path | None = None):
        super().__init__(CardMemory(gpu))
        self.gpu, self.rules, self.script = gpu, rules, script
        self.met_rules: set[str] = set()
        self.assumptions: dict[str, None] = {}  # in their order
        self.work = WorkLog()
        self.most = None  # births and deaths that there may be
        self.stream_object = None  # the stream that Python code has chosen, if any
        self.waits = Waits(self.assumptions)
        self.thread = _Thread()
        self._handles_used = set()
        self._stopped = False
        self.on_step_by_hand = lambda: None
        self._by_hand = None  # whether weights were changed since a backward pass; None before one
        self._lock = threading.RLock()  # the reader's threads

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if isinstance(func, torch._ops.HigherOrderOperator):
            return higher_order.run(self, func, args, kwargs or {})
        if func is torch.ops.prim.device.default:  # asked very often, touches no memory
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if any(map(is_wrapper_subclass, types)):
            return NotImplemented  # it comes again with the others
        kwargs = kwargs or {}
        tensors = tensors_in(args) if not kwargs else tensors_in((*args, *kwargs.values()))
        with (
            self._lock,
            torch._C.DisableTorchFunction(),
        ):  # questions below must not re-enter the function mode
            self.waits.notice(sys._getframe(1))
            try:
                if self._goes_to_card(tensors, kwargs.get("device"), kwargs.get("dtype")):
                    return self._on_card(func, types, args, kwargs, tensors)
                return self._on_host(func, args, kwargs, tensors)
            except NotImplementedError as error:
                if "storage" not in str(error):
                    raise
                raise NotSimulated(
                    f"{func} is not simulated: it takes or makes a sparse tensor. Use a dense one; "
                    "embeddings have sparse=False"
                ) from None

    def _goes_to_card(self, tensors, device, dtype) -> bool:
        """Whether an operation's result is the card's."""
        if device is not None:
            if device.type == "meta":
                return False
            if is_cuda_device(device):
                return True
            if self.thread.call is not None and self.thread.call.names_host:
                return False
        if tensors:
            return any(map(on_card, tensors))
        # PyTorch's own code makes a tensor beside others, whose device it takes for the cpu.
        call = self.thread.call
        if call is not None and dtype is not None and dtype is call.host_dtype:
            return False
        if call is not None:
            return any(map(on_card, tensors_in((*call.args, *call.kwargs.values()))))
        return self.phase() == Phase.BACKWARD

    def step_ended(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """As `Tracer.step_ended`; the work of a step ends here, or with the backward pass."""
        if torch._C._current_graph_task_id() != -1:
            self.work.end_step_in_backward()
        else:
            self.work.end_step(optimizer)
        self.waits.steps += 1
        self._by_hand = None

    def begin_update(self) -> None:
        """The gradients of a step are there; what follows clips and applies them."""
        self.mark(Marker.UPDATE)
        self.work.begin_update()

    def end_step_by_hand(self) -> None:
        """Weights that were changed in place after a backward pass made a step."""
        if self._by_hand:
            self.step_ended()
            self.on_step_by_hand()

    def _follow_step_by_hand(self, func, args, tensors) -> None:
        """The change of one weight begins such a step, the next backward pass ends it."""
        for tensor in tensors:
            # A view that was made under no_grad may not be asked for its graph.
            if tensor.requires_grad and not tensor._is_view() and tensor.is_leaf:
                # FSDP writes what it gathers anew in every micro-batch: no step.
                if not is_gathered(tensor.untyped_storage()):
                    tensor.untyped_storage()._memlab_weight = True
        if torch._C._current_graph_task_id() != -1:
            if self._by_hand is None:
                self._by_hand = False
            elif self._by_hand:
                self.end_step_by_hand()
        elif self._by_hand is not None and _writes(func) and self._stepping is None:
            for tensor in tensors_in(args[:1]):
                if hasattr(tensor.untyped_storage(), "_memlab_weight"):
                    self._by_hand = True
                    self._see_weight(tensor)

    def stop(self) -> None:
        """Enter nothing any more: what dies from now on was there to the end."""
        self._stopped = True

    def died(self, storage) -> None:
        """As `Tracer.died`, until the card is left."""
        if not self._stopped:
            super().died(storage)

    def born(self, nbytes, category) -> Storage:
        """As `Tracer.born`, with the line of the script that is at work."""
        if self.most is not None and len(self) > self.most:
            raise ValueError(f"more than {self.most:,} births and deaths")
        storage = super().born(nbytes, category)
        if self.script is not None:
            storage.line = line_at_work(self.script, sys._getframe())
        return storage

    def _runs_autograd(self) -> bool:
        """As `Tracer._runs_autograd`: Python code has called nothing here."""
        return self.thread.call is None

    def see_part(self, tensor, category, existed, module) -> None:
        """As `Tracer.see_part`, for what is on the card."""
        if on_card(tensor):
            super().see_part(tensor, category, existed, module)

    def see_result(self, out) -> None:
        """As `Tracer.see_result`. Dropout takes its mask first: aten/.../cuda/Dropout.cu."""
        dropped = self.operation is aten.native_dropout.default and isinstance(out, tuple)
        super().see_result(out[::-1] if dropped else out)

    def resized(self, data) -> Storage | None:
        """As `Tracer.resized`, for what is on the card."""
        return None if is_on_host(data) else super().resized(data)

    # ------------------------------------------------------------------ values

    def _read(self, tensor):
        """What `.item()` gives: the value if it is known, else one that stands for it."""
        value = known_values.item_value(tensor)
        return value if known_values.is_decided(tensor) else self.waits.answer(value, tensor)

    def _compare(self, func, args, kwargs):
        answer = known_values.compare(func, args, kwargs)
        known = known_values.all_known(args, kwargs)
        return answer if known else self.waits.answer(answer, args[0])

    def host_copy(self, tensor):
        """An ordinary tensor for a fake one, as `memlab.card.known_values.host_copy` makes it."""
        known = known_values.values_of(tensor) is not None or tensor.numel() != 1
        return known_values.host_copy(tensor, None if known else self._read(tensor))

    # ------------------------------------------------------------------ the card

    def _on_card(self, func, types, args, kwargs, tensors):
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        if func is aten.copy_.default and not on_card(args[0]):
            return self._write_on_host(*args[:2])
        if func is aten.masked_select.default:
            return self._select_by_mask(*args)
        if func is aten._pack_padded_sequence.default:
            return self._pack(*args)
        if func in dynamic_shapes.BY_MASK:
            args = self._without_masks(args, dynamic_shapes.BY_MASK[func])
        refuse_two_devices(func, tensors)
        refusals.refuse(func, args)
        if func in dynamic_shapes.LARGEST:
            return self._shaped_by_values(func, args, kwargs, tensors)
        if func in (aten.equal.default, aten.allclose.default):
            return self._compare(func, args, kwargs)
        self._follow_step_by_hand(func, args, tensors)
        here, options = self._without_data(args, kwargs, tensors)
        self._take_workspaces(func)
        try:
            out = super().__torch_dispatch__(func, types, here, options)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise NotSimulated(f"{func} is not simulated: {ONLY_A_CARD_KNOWS}") from None
        self.work.note(func, here, options, tensors, out, self.phase(), self.stream)
        self._take_scratch(func, here, out)
        self._take_buffer(scratch.reduction_of(func, here))
        known_values.propagate(func, args, kwargs, out)
        return out

    def _take_scratch(self, func, args, out) -> None:
        """What a kernel takes and gives back inside, and what its result holds beside its own."""
        taken = [*scratch.kernel_scratch(func, args), *composites.temporaries(func, args)]
        kept = composites.kept(func, args)
        if taken or kept:
            self.met_rules.add("scratch of kernels")
        if "scratch of kernels" not in self.rules:
            return
        if kept:
            storage = self.born(kept, Category.TEMPORARY)
            weakref.finalize(out.untyped_storage(), self.died, storage)
        for sizes in taken:
            self._take_and_give_back(*sizes)

    def _take_and_give_back(self, *sizes) -> None:
        for storage in [self.born(nbytes, Category.TEMPORARY) for nbytes in sizes]:
            self.died(storage)

    def _take_buffer(self, reduction) -> None:
        nbytes = reduction and reduction.buffer(self.gpu.threads)
        if reduction and self.most is not None:  # at other widths too few threads may be enough
            nbytes = min(reduction.buffer(UNLIMITED), 1)
        if nbytes:
            self.met_rules.add("sums of rows")
        if nbytes and "sums of rows" in self.rules:
            storage = self.born(nbytes, Category.TEMPORARY)
            storage.reduction = reduction
            self.died(storage)

    def _without_data(self, args, kwargs, tensors):
        """The arguments, with a fake tensor of the host for each that has data."""
        if all(type(tensor) is FakeTensor for tensor in tensors):
            return args, kwargs

        def fake(tensor):
            if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
                return tensor
            return self._fake(tensor, on_host=True)

        return tree_map_only(torch.Tensor, fake, (args, kwargs))

    def _fake(self, like, on_host=False) -> FakeTensor:
        """A new fake tensor with the shape, the strides and the dtype of another."""
        with no_dispatch():
            shape, strides = like.shape, like.stride()
            meta = torch.empty_strided(shape, strides, dtype=like.dtype, device="meta")
            made = FakeTensor(self.mode, meta, torch.device("cpu"))
        if on_host:
            place_on_cpu(made)
        return made

    def came_back(self, tensor) -> None:
        """A saved tensor is wanted again, which a hook may have moved or made anew."""
        known = self._live.get(tensor.untyped_storage()._cdata) if on_card(tensor) else None
        if known and known[0].category == Category.TEMPORARY:
            known[0].category = Category.ACTIVATIONS

    # ------------------------------------------------------------------ the libraries

    def _take_workspaces(self, func) -> None:
        """cuBLAS takes a workspace at a thread's first product and keeps it.

        The backward pass has a thread, and so a handle and a workspace, of its own
        (aten/src/ATen/cuda/CublasHandlePool.cpp); so has cublasLt, which addmm uses for the
        bias.
        """
        if not scratch.uses_cublas(func):
            return
        self.operation = func
        thread = self.phase() == Phase.BACKWARD
        for handle, nbytes in (
            ("cublas", self.gpu.workspace),
            ("cublasLt", scratch.CUBLASLT_WORKSPACE),
        ):
            wanted = handle == "cublas" or func is torch.ops.aten.addmm.default
            if wanted and (handle, thread) not in self._handles_used:
                self._handles_used.add((handle, thread))
                self.born(nbytes, Category.WORKSPACES)


ONLY_A_CARD_KNOWS = (
    "what it gives depends on values that only a real card has. Do it on the host, with .cpu(), or "
    "without it"
)


@functools.cache
def _writes(func) -> bool:
    """Whether an operator changes values: `set_` only gives a tensor another storage."""
    return func._schema.is_mutable and func._opname != "set_"
