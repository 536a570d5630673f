"""An exact log of tensor memory: when every storage is born, what it is for, when it dies.

A `Tracer` is told of every operation, before and after it, by a dispatch mode: its own, for real
and fake tensors alike, or that of a simulated card. It looks at storages rather than tensors,
because views share one storage, and it keeps a weak reference to each, so it prolongs no life.
Everything is in bytes.
"""

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.footprint import Category, Phase
from memlab.trace.allocator import CachingAllocator
from memlab.trace.ledger import Ledger, Storage
from memlab.trace.linear_cross_entropy import seen_in_parts
from memlab.trace.module_names import ModuleWatch
from memlab.trace.patches import replaced
from memlab.trace.quantized_weights import constants, constants_of_layers
from memlab.trace.tensors import (
    FILLS_ZEROS,
    inner_tensors,
    is_gathered,
    is_on_host,
    is_wrapper_subclass,
    on_card,
    sole_summand,
    tensors_in,
)
from memlab.trace.user_frames import line_at_work


class Tracer(Ledger):
    """Log the births and deaths of storages while it is entered.

    allocator: a `CachingAllocator` that serves every birth and death as it
        happens, or None to count the tensors' own bytes.
    card_only: whether what lies on a simulated card counts alone (`memlab.trace.tensors.on_card`).
    script: whose lines are noted with what they make; files beside it count as its own.
    most: births and deaths, beyond which it raises a ValueError; None for any number.

    A storage that existed before and is touched inside counts from the beginning. Categories
    are found without being told:

    - parameters: storages of `torch.nn.Parameter`
    - gradients: what a parameter's `.grad` holds once it has been accumulated
    - optimizer_states: tensors in `optimizer.state` after a step
    - activations: born in the forward pass and still alive when the backward pass begins, or
      recomputed for it
    - inputs, buffers: what `watch` was given; what is written to after the backward pass that it
      lived through, such as a moving average of the weights, counts under buffers, too
    - temporary: everything else; also what FSDP gathers of other ranks' parameters, for as long as
      it is here

    A tensor that is made of others, as DTensor is of the part that this rank holds, counts as they.

    With each birth goes the operation and the module that is at work; see `ModuleWatch`.
    """

    stage: Phase | None = None
    most: int | None = None

    def __init__(
        self,
        allocator: CachingAllocator | None = None,
        card_only: bool = False,
        script: Path | None = None,
    ):
        super().__init__(allocator)
        self.card_only, self.script = card_only, script
        self._stopped = False
        self._live: dict[int, tuple[Storage, weakref.ref]] = {}
        self._awaiting_backward: set[Storage] = set()
        self._before_backward = 0  # the storages that there were when the last one began
        self.operation: OpOverload | None = None  # the one at work, which makes what is born
        self.stream = 0  # the number of the one in which it works
        self._stepping: Any = None  # the optimizer that is at work
        self._stepped = False
        self._watch = ModuleWatch(self._belongs)
        self._token = object()  # marks parameters whose gradient is followed
        self._handles: list[Any] = []
        self._entered = contextlib.ExitStack()

    # ------------------------------------------------------------------ what the user calls

    def watch(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:
        """Count these from now on, also the parts that no operation touches."""
        if model is not None:
            self._watch.name_all(model)
            for parameter in model.parameters():
                self.see_parameter(parameter)
            for tensor in constants_of_layers(model):
                self.see(tensor, Category.PARAMETERS, existed=True)
            for buffer in model.buffers():
                self.see(buffer, Category.BUFFERS, existed=True)
        if optimizer is not None:
            self._label_states(optimizer)
        for tensor in inputs:
            self.see(tensor, Category.INPUTS, existed=True)

    def name(self, tensor: torch.Tensor, module: str) -> None:
        """Say what a tensor is, in place of the module that made it."""
        storage = self._known(tensor)
        if storage:
            storage.module = module

    def _known(self, tensor: torch.Tensor) -> Storage | None:
        """What is entered of a tensor's memory."""
        return self._live.get(tensor.untyped_storage()._cdata, (None,))[0]

    def stop(self) -> None:
        """Enter nothing any more: what dies from now on was there to the end."""
        self._stopped = True

    # ------------------------------------------------------------------ what it sees

    def phase(self) -> Phase:
        """What the training is at, or the stage that inference is said to be at."""
        if self.stage is not None:
            return self.stage
        if self._stepping is not None:
            return Phase.STEP
        if torch._C._current_graph_task_id() != -1:
            return Phase.BACKWARD
        return Phase.ZERO_GRAD if self._stepped else Phase.FORWARD

    def born(self, nbytes: int, category: Category) -> Storage:
        """Enter a storage that the operation at work makes now."""
        if self.most is not None and len(self) > self.most:
            raise ValueError(f"more than {self.most:,} births and deaths")
        phase = self.phase()
        module = self._watch.now(in_backward=phase == Phase.BACKWARD)
        storage = self.birth(nbytes, category, phase, module, self.operation, self.stream)
        if self.script is not None:
            storage.line = line_at_work(self.script, sys._getframe())
        return storage

    def died(self, storage: Storage) -> None:
        """Enter the end of a storage."""
        if not self._stopped:
            self._awaiting_backward.discard(storage)
            self.death(storage, self.phase())

    def see(
        self, tensor: torch.Tensor, category: Category | None = None, existed: bool = False
    ) -> None:
        """Log a storage at first sight or when it was resized; give it a category."""
        module = getattr(tensor, "_memlab_module", None)
        for part in inner_tensors(tensor):
            if not self.card_only or on_card(part):
                self._see_part(part, category, existed, module)

    def _see_part(
        self, tensor: torch.Tensor, category: Category | None, existed: bool, module: str | None
    ) -> None:
        """As `see`, of a tensor that is made of no others. module: the one that it belongs to."""
        data = tensor.untyped_storage()
        key, nbytes = data._cdata, data.nbytes()
        entry = self._live.get(key)
        if entry is None:
            if nbytes == 0:
                return
            storage = self._first_sight(nbytes, category, existed)
            storage.item = tensor.itemsize
            self._follow(data, key, storage)
        else:
            storage = entry[0]
            if nbytes != storage.nbytes:  # resize_ frees the old memory and takes new
                resized = self.resized(data)
                if resized is None:
                    return
                storage = resized
        if category:
            storage.category = category
            self._awaiting_backward.discard(storage)
        storage.module = module or storage.module

    def resized(self, data: torch.UntypedStorage) -> Storage | None:
        """`UntypedStorage.resize_` frees the old memory of a storage and takes new, if any."""
        if self.card_only and (is_on_host(data) or data.device.type != "meta"):
            return None
        entry = self._live.pop(data._cdata, None)
        if entry:
            self.died(entry[0])
        if data.nbytes() == 0:
            return None
        category = entry[0].category if entry and not is_gathered(data) else Category.TEMPORARY
        self.operation = torch.ops.aten.resize_.default
        storage = self.born(data.nbytes(), category)
        self._follow(data, data._cdata, storage)
        return storage

    def _belongs(self, tensor: Any, module: str) -> None:
        """A parameter or buffer belongs to a module, and its gradient with it."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
        tensor._memlab_module = module
        if is_lazy(tensor):  # it has no storage yet
            return
        for tensor_or_gradient in (tensor, tensor.grad if tensor.is_leaf else None):
            for part in inner_tensors(tensor_or_gradient) if tensor_or_gradient is not None else ():
                storage = self._known(part)
                if storage:
                    storage.module = module
                    if tensor_or_gradient is tensor and not is_gathered(part.untyped_storage()):
                        parameter = isinstance(tensor, torch.nn.Parameter)
                        storage.category = Category.PARAMETERS if parameter else Category.BUFFERS
                        self._awaiting_backward.discard(storage)

    def _first_sight(self, nbytes: int, category: Category | None, existed: bool) -> Storage:
        if existed and self.allocator is None:
            # It was there before the first entry: raise the floor, log nothing.
            module = self._watch.now(in_backward=self.phase() == Phase.BACKWARD)
            return self.existed(nbytes, category or Category.INPUTS, module, self.operation)
        self._stepped = False
        phase = self.phase()
        recomputed = phase == Phase.BACKWARD and torch.is_grad_enabled()
        usual = Category.ACTIVATIONS if recomputed else Category.TEMPORARY
        storage = self.born(nbytes, category or usual)
        if category is None and phase == Phase.FORWARD and not existed:
            self._awaiting_backward.add(storage)
        return storage

    def _follow(self, data: torch.UntypedStorage, key: int, storage: Storage) -> None:
        def died(_: Any, key: int = key, storage: Storage = storage) -> None:
            if self._live.get(key, (None,))[0] is storage:
                del self._live[key]
            self.died(storage)

        self._live[key] = (storage, weakref.ref(data, died))

    # ------------------------------------------------------------------ what happens to tensors

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.hooks())
            stack.enter_context(_EveryOperation(self))
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow what no operation tells: modules, optimizer steps, what FSDP keeps and resizes."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            *self._watch.register(),
        ]
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(data: torch.UntypedStorage, nbytes: int) -> Any:
            before, result = data.nbytes(), resize(data, nbytes)
            if data.nbytes() != before:
                self.resized(data)
            return result

        gather = FSDPParam.init_all_gather_outputs

        def gather_and_tell(shared: Any, *args: Any, **kwargs: Any) -> None:
            gather(shared, *args, **kwargs)
            for tensor in shared.all_gather_outputs:
                tensor.untyped_storage()._memlab_gathered = True
                self.see(tensor, Category.TEMPORARY)

        reduce = FSDPParamGroup.post_backward

        def reduce_and_tell(group: FSDPParamGroup, *unused: Any) -> None:
            reduce(group, *unused)
            if not group.reduce_grads:
                self._see_kept(group)

        rows = (
            (torch.UntypedStorage, "resize_", resize_and_tell),
            (FSDPParam, "init_all_gather_outputs", gather_and_tell),
            (FSDPParamGroup, "post_backward", reduce_and_tell),
        )
        try:
            with replaced(*rows), seen_in_parts():
                yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def before(self, func: OpOverload, args: tuple, kwargs: dict) -> None:
        """An operation is about to run on these arguments."""
        self.operation = None  # what an operation meets and does not make
        given = (*args, kwargs["out"]) if "out" in kwargs else args
        for tensor in tensors_in(given) if func is not torch.ops.aten.lift_fresh.default else ():
            self._see_argument(tensor)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self._awaiting_backward and not torch.is_grad_enabled():
            for storage in self._awaiting_backward:
                storage.category = Category.ACTIVATIONS
            self._awaiting_backward.clear()
            self._before_backward = len(self.storages)
        elif self._before_backward and not in_backward and func._schema.is_mutable and args:
            self._see_written(args[0])
        self.operation = func

    def after(self, func: OpOverload, args: tuple, out: Any, by_autograd: bool = True) -> None:
        """It has run. by_autograd: whether it may be one of PyTorch's own derivatives."""
        if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            if self._done_in_place(func, args, out, by_autograd):
                return
        for tensor in tensors_in([out]):
            self.see(tensor)
        self._see_communication(func, args)

    def came_back(self, tensor: torch.Tensor) -> None:
        """A saved tensor is wanted again, which a hook may have moved or made anew."""
        storage = self._known(tensor) if on_card(tensor) else None
        if storage and storage.category == Category.TEMPORARY:
            storage.category = Category.ACTIVATIONS

    def _see_written(self, written: Any) -> None:
        """A tensor written after the backward pass that it outlived is a buffer."""
        for tensor in tensors_in([written]):
            storage = self._known(tensor)
            if storage and storage.number < self._before_backward:
                if storage.category == Category.ACTIVATIONS:
                    storage.category = Category.BUFFERS

    def _see_communication(self, func: OpOverload, args: tuple) -> None:
        """Name what other ranks take part in."""
        if func.namespace == "c10d" and func._opname == "allreduce_":
            for tensor in args[0]:  # the bucket of DistributedDataParallel
                if self.phase() == Phase.BACKWARD:
                    self.see(tensor, Category.GRADIENTS, existed=True)

    def _see_kept(self, group: FSDPParamGroup) -> None:
        """Gradients that FSDP does not reduce after this micro-batch stay whole.

        In the parameters' own, or, before PyTorch 2.15 and of another format, beside them.
        """
        for shared in group.fsdp_params:
            gradient, own = (
                shared.unsharded_accumulated_grad,
                getattr(shared, "_unsharded_param", None),
            )
            if gradient is None and own is not None:  # the forward pass has used it
                gradient = own.grad
            if gradient is not None:
                self.see(gradient, Category.GRADIENTS)
                self._same_module(gradient, shared.sharded_param)

    def _see_argument(self, tensor: torch.Tensor) -> None:
        storage = self._known(tensor)
        if isinstance(tensor, torch.nn.Parameter) and not is_gathered(tensor.untyped_storage()):
            if storage is None or storage.category != Category.PARAMETERS:  # it may have new data
                self.see_parameter(tensor)
            self._follow_gradient(tensor)
        elif storage is None:
            self.see(tensor, existed=True)

    def see_parameter(self, parameter: torch.nn.Parameter) -> None:
        for tensor in (parameter, *constants(parameter)):
            self.see(tensor, Category.PARAMETERS, existed=True)

    def see_weight(self, tensor: torch.Tensor) -> None:
        """A weight that is no `torch.nn.Parameter`: what an optimizer, or code, steps."""
        self.see(tensor, Category.PARAMETERS, existed=True)
        if tensor.requires_grad and not tensor._is_view() and tensor.is_leaf:
            self._follow_gradient(tensor)

    def _follow_gradient(self, parameter: Any) -> None:
        if getattr(parameter, "_memlab_token", None) is self._token:
            return
        # An attribute, because a weak reference would forbid Module.to() to swap the tensor.
        parameter._memlab_token = self._token
        if parameter.requires_grad and parameter.is_leaf:
            if parameter.grad is not None:
                self.see(parameter.grad, Category.GRADIENTS, existed=True)
            hook = parameter.register_post_accumulate_grad_hook(self._see_gradient)
            self._handles.append(hook)

    def _see_gradient(self, parameter: torch.Tensor, existed: bool = False) -> None:
        if parameter.grad is not None:  # no earlier hook has used it up
            self.see(parameter.grad, Category.GRADIENTS, existed)
            self._same_module(parameter.grad, parameter)

    def _same_module(self, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        module = getattr(parameter, "_memlab_module", None)
        for part in inner_tensors(tensor):
            storage = self._known(part)
            if module and storage:
                storage.module = module

    def _done_in_place(self, func: OpOverload, args: tuple, out: Any, by_autograd: bool) -> bool:
        """Whether a result of autograd's takes over an argument's storage without the tracer."""
        if func is torch.ops.aten.add.Tensor:
            taken = sole_summand(args, out, self._live)
        else:
            taken = args[0] if func in FILLS_ZEROS and by_autograd else None
        entry = None if taken is None else self._live.pop(taken.untyped_storage()._cdata, None)
        if entry:
            data = out.untyped_storage()
            self._follow(data, data._cdata, entry[0])
        return bool(entry)

    @property
    def in_step(self) -> bool:
        """Whether an optimizer is at work."""
        return self._stepping is not None

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is not None:  # an optimizer that has another do the work
            return
        self._stepping = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not isinstance(parameter, torch.nn.Parameter):
                    self.see_weight(parameter)
                self._see_gradient(parameter, existed=True)  # which FSDP puts there itself

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._label_states(optimizer)
        if optimizer is self._stepping:
            self._stepping, self._stepped = None, True

    def _label_states(self, optimizer: Any) -> None:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer = optimizer.optim  # of this rank's weights, with their states
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.see(value, Category.OPTIMIZER_STATES, existed=True)
                    self._same_module(value, parameter)


class _EveryOperation(TorchDispatchMode):
    """Tells a tracer of every operation."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard against torch.compile around every operation: it costs a tenth of the time."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(map(is_wrapper_subclass, types)):
            return NotImplemented  # it comes again with the others
        kwargs = kwargs or {}
        self._tracer.before(func, args, kwargs)
        out = func(*args, **kwargs)
        self._tracer.after(func, args, out)
        return out
