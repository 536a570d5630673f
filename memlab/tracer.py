"""An exact log of tensor memory: when every storage is born, what it is for, when it dies.

`Tracer` is a `TorchDispatchMode`, so it sees every operation that PyTorch runs, on real and on
fake tensors alike. It looks at storages rather than tensors, because views share one storage,
and it keeps a weak reference to each, so it prolongs no life. Everything is in bytes.
"""

from __future__ import annotations

import weakref

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.footprint import CATEGORIES, Footprint, Life, Timeline
from memlab.modules import ModuleWatch

FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"
ZERO_GRAD = "zero_grad"  # after a step, until the next tensor is born


class Tracer(TorchDispatchMode):
    """Log the births and deaths of storages while it is entered.

    allocator: a `memlab.allocator.CachingAllocator` that serves every birth and death as it
        happens, or None to count the tensors' own bytes.

    A storage that existed before and is touched inside counts from the beginning. Categories
    are found without being told:

    - parameters: storages of `torch.nn.Parameter`
    - gradients: what a parameter's `.grad` holds once it has been accumulated
    - optimizer_states: tensors in `optimizer.state` after a step
    - activations: born in the forward pass and still alive when the backward pass begins, or
      recomputed for it
    - inputs, buffers: what `watch` was given
    - temporary: everything else

    With each birth goes the operation and the module that is at work; see `ModuleWatch`.
    """

    def __init__(self, allocator=None):
        super().__init__()
        self.allocator = allocator
        self.sizes: list[int] = []
        self.categories: list[str] = []
        self.makers: list = []  # the operation that made each storage
        self.modules: list[str] = []
        # One entry an event: (change in bytes, storage number, phase, allocated, reserved).
        self.events: list[tuple[int, int, str, int, int]] = []
        self._start = 0  # the event from which peaks count
        self._allocated = 0
        self._before = 0  # bytes that existed before the tracer was entered
        self._live: dict[int, tuple[int, weakref.ref]] = {}
        self._addresses: dict[int, int] = {}
        self._awaiting_backward: set[int] = set()
        self._stepping = self._stepped = False
        self._maker = None
        self._watch = ModuleWatch(self._belongs)
        self._token = object()  # marks parameters whose gradient is followed
        self._handles = []

    # ------------------------------------------------------------------ what the user calls

    def watch(self, model=None, optimizer=None, inputs=()) -> None:
        """Count these from now on, also the parts that no operation touches."""
        if model is not None:
            self._watch.name_all(model)
            for parameter in model.parameters():
                self._see(parameter, "parameters", existed=True)
            for buffer in model.buffers():
                self._see(buffer, "buffers", existed=True)
        if optimizer is not None:
            self._label_states(optimizer)
        for tensor in inputs:
            self._see(tensor, "inputs", existed=True)

    def reset_peak(self) -> None:
        """Begin a new measured stretch, as `torch.cuda.reset_peak_memory_stats` does."""
        self._start = len(self.events)
        if self.allocator is not None:
            self.allocator.reset_peak_stats()

    def peak(self) -> tuple[int, int, str, int]:
        """(allocated bytes, reserved bytes, phase, number of the event) since `reset_peak`."""
        start = self._start
        peak, reserved, phase, index = self._before, 0, FORWARD, start - 1
        if start:
            peak, reserved = self.events[start - 1][3] + self._before, self.events[start - 1][4]
        for i in range(start, len(self.events)):
            _, _, now, allocated, held = self.events[i]
            if allocated + self._before > peak:
                peak, phase, index = allocated + self._before, now, i
            reserved = max(reserved, held)
        return peak, reserved, phase, index

    def footprint(self) -> Footprint:
        """The peak since the last `reset_peak`, by category."""
        start = self._start
        peak, peak_reserved, phase, index = self.peak()
        breakdown = self._breakdown(index)
        if self.allocator is not None:
            breakdown["rounding"] = peak - sum(breakdown.values())
        return Footprint(
            peak_allocated=peak,
            peak_reserved=peak_reserved if self.allocator is not None else None,
            breakdown=breakdown,
            peak_phase=phase,
            timeline=self._timeline(start),
        )

    # ------------------------------------------------------------------ the log

    def _birth(self, nbytes, category) -> int:
        number = len(self.sizes)
        if self.allocator is not None:
            self._addresses[number] = self.allocator.allocate(nbytes)
        self._describe(nbytes, category)
        self._log(nbytes, number)
        return number

    def _describe(self, nbytes, category) -> None:
        self.sizes.append(nbytes)
        self.categories.append(category)
        self.makers.append(self._maker)
        in_backward = not self._stepping and torch._C._current_graph_task_id() != -1
        self.modules.append(self._watch.now(in_backward))

    def _death(self, number) -> None:
        if self.allocator is not None:
            self.allocator.free(self._addresses.pop(number))
        self._awaiting_backward.discard(number)
        self._log(-self.sizes[number], number)

    def _log(self, change, number) -> None:
        self._allocated += change
        allocated, reserved = self._allocated, 0
        if self.allocator is not None:
            allocated, reserved = self.allocator.allocated, self.allocator.reserved
        self.events.append((change, number, self._phase(), allocated, reserved))

    def _phase(self) -> str:
        if self._stepping:
            return STEP
        if torch._C._current_graph_task_id() != -1:
            return BACKWARD
        return ZERO_GRAD if self._stepped else FORWARD

    def _see(self, tensor, category=None, existed=False) -> None:
        """Log a storage at first sight or when it was resized; give it a category."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        nbytes = storage.nbytes()
        if known is None:
            if nbytes == 0:
                return
            number = self._first_sight(nbytes, category, existed)
            self._follow(storage, key, number)
        else:
            number = known[0]
            if nbytes != self.sizes[number]:  # resize_ frees the old memory and takes new
                self._death(number)
                number = self._birth(nbytes, self.categories[number])
                self._follow(storage, key, number)
        if category:
            self.categories[number] = category
            self._awaiting_backward.discard(number)
        module = getattr(tensor, "_memlab_module", None)
        if module:
            self.modules[number] = module

    def _belongs(self, tensor, module) -> None:
        """A parameter or buffer belongs to a module, and its gradient with it."""
        tensor._memlab_module = module
        for part in (tensor, tensor.grad if tensor.is_leaf else None):
            known = part is not None and self._live.get(part.untyped_storage()._cdata)
            if known:
                self.modules[known[0]] = module
                if part is tensor and not isinstance(tensor, torch.nn.Parameter):
                    self.categories[known[0]] = "buffers"

    def _first_sight(self, nbytes, category, existed) -> int:
        if existed and self.allocator is None:
            # It was there before the first event: raise the floor, log nothing.
            self._describe(nbytes, category or "inputs")
            self._before += nbytes
            return len(self.sizes) - 1
        self._stepped = False
        phase = self._phase()
        recomputed = phase == BACKWARD and torch.is_grad_enabled()
        number = self._birth(nbytes, category or ("activations" if recomputed else "temporary"))
        if category is None and phase == FORWARD and not existed:
            self._awaiting_backward.add(number)
        return number

    def _follow(self, storage, key, number) -> None:
        def died(_, key=key, number=number):
            if self._live.get(key, (None,))[0] == number:
                del self._live[key]
            self._death(number)

        self._live[key] = (number, weakref.ref(storage, died))

    # ------------------------------------------------------------------ the dispatch mode

    def __enter__(self):
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            *self._watch.register(),
        ]
        return super().__enter__()

    def __exit__(self, *error):
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard against torch.compile around every operation: it costs a tenth of the time."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._maker = None  # what an operation meets and does not make
        for argument in args if func is not torch.ops.aten.lift_fresh.default else ():
            if isinstance(argument, torch.Tensor):
                self._see_argument(argument)
            elif isinstance(argument, (list, tuple)):
                for item in argument:
                    if isinstance(item, torch.Tensor):
                        self._see_argument(item)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self._awaiting_backward and not torch.is_grad_enabled():
            for number in self._awaiting_backward:
                self.categories[number] = "activations"
            self._awaiting_backward.clear()
        self._maker = func
        out = func(*args, **kwargs)
        if in_backward and func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            if self._accumulated_in_place(args, out):
                return out
        self._see_result(out)
        return out

    def _see_argument(self, tensor) -> None:
        if tensor.untyped_storage()._cdata in self._live:
            if not isinstance(tensor, torch.nn.Parameter):
                return
            if getattr(tensor, "_memlab_token", None) is self._token:
                return
        if isinstance(tensor, torch.nn.Parameter):
            self._see(tensor, "parameters", existed=True)
            self._follow_gradient(tensor)
        else:
            self._see(tensor, existed=True)

    def _see_result(self, out) -> None:
        if isinstance(out, torch.Tensor):
            self._see(out)
        elif isinstance(out, (list, tuple)):
            for item in out:
                self._see_result(item)

    def _follow_gradient(self, parameter) -> None:
        # An attribute, because a weak reference would forbid Module.to() to swap the tensor.
        parameter._memlab_token = self._token
        if parameter.requires_grad and parameter.is_leaf:
            if parameter.grad is not None:
                self._see(parameter.grad, "gradients", existed=True)
            hook = parameter.register_post_accumulate_grad_hook(self._accumulated)
            self._handles.append(hook)

    def _accumulated(self, parameter) -> None:
        self._see(parameter.grad, "gradients")
        self._same_module(parameter.grad, parameter)

    def _same_module(self, tensor, parameter) -> None:
        module = getattr(parameter, "_memlab_module", None)
        known = self._live.get(tensor.untyped_storage()._cdata)
        if module and known:
            self.modules[known[0]] = module

    def _accumulated_in_place(self, args, out) -> bool:
        """Whether the engine would have added into its own buffer instead of a new tensor.

        Where two paths of the graph meet, autograd adds their gradients. It reuses the first
        one's memory when nobody else holds it, except under a dispatch mode such as this one
        (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp). So the log follows
        what happens without the tracer: the sum takes over the storage of a summand.
        """
        first, second = args[0], args[1]
        if not isinstance(second, torch.Tensor) or first.shape != second.shape:
            return False
        if first.dtype != out.dtype:
            return False
        for summand in (first, second):
            storage = summand.untyped_storage()
            known = self._live.get(storage._cdata)
            alone = (
                summand._use_count() <= SOLE_TENSOR_USES
                and torch._C._storage_Use_Count(storage._cdata) <= SOLE_STORAGE_USES
            )
            if known and alone:
                del self._live[storage._cdata]
                new = out.untyped_storage()
                self._follow(new, new._cdata, known[0])
                return True
        return False

    def _before_step(self, optimizer, args, kwargs) -> None:
        self._stepping = True

    def _after_step(self, optimizer, args, kwargs) -> None:
        self._label_states(optimizer)
        self._stepping, self._stepped = False, True

    def _label_states(self, optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._see(value, "optimizer_states", existed=True)
                    self._same_module(value, parameter)

    # ------------------------------------------------------------------ analysis

    def _floor(self) -> dict[str, int]:
        """Bytes by category of what existed before the first event."""
        floor = dict.fromkeys(CATEGORIES, 0)
        born = {number for change, number, *_ in self.events if change > 0}
        for number, size in enumerate(self.sizes):
            if number not in born:
                floor[self.categories[number]] += size
        return floor

    def _breakdown(self, index) -> dict[str, int]:
        breakdown = self._floor()
        for change, number, *_ in self.events[: index + 1]:
            breakdown[self.categories[number]] += change
        return breakdown

    def _timeline(self, start) -> Timeline:
        levels = self._breakdown(start - 1)
        steps = [dict(levels)]
        phases = [self.events[start][2] if start < len(self.events) else FORWARD]
        served = [self.events[start - 1][3] if start else 0]
        for change, number, phase, allocated, _ in self.events[start:]:
            levels[self.categories[number]] += change
            steps.append(dict(levels))
            phases.append(phase)
            served.append(allocated)
        if self.allocator is not None:
            for step, allocated in zip(steps, served, strict=True):
                step["rounding"] = allocated - sum(step.values())
        levels = {name: [step[name] for step in steps] for name in CATEGORIES}
        return Timeline(phases, levels, self._lives(start), self.peak()[3] - start + 1)

    def _lives(self, start) -> list[Life]:
        """Everything that lived from the event `start` on, in the order of birth."""
        born, died = dict.fromkeys(range(len(self.sizes)), 0), {}
        for moment, (change, number, *_) in enumerate(self.events, start=1 - start):
            (born if change > 0 else died)[number] = max(0, moment)
        return [
            Life(
                self.sizes[number],
                self.categories[number],
                self.modules[number],
                operation_name(self.makers[number]),
                born[number],
                died.get(number),
            )
            for number in born
            if died.get(number) != 0
        ]


def operation_name(maker) -> str:
    """`aten.mm`, in PyTorch's words."""
    return str(maker.overloadpacket) if maker is not None else "made before"


# How many references a gradient has, seen from the dispatch of the addition, when the autograd
# engine alone holds it: the engine's buffer and the dispatcher's copies of the argument.
# tests/test_tracer.py compares the result with the profiler's log, in which no mode is active.
SOLE_TENSOR_USES = 4
SOLE_STORAGE_USES = 2
