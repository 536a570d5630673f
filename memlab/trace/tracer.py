"""An exact log of tensor memory: when each storage is allocated, for what, and when it is freed.

A dispatch mode calls a `Tracer` before and after every operation. The mode is the tracer's own, for
real and fake tensors alike, or that of a simulated GPU. The tracer follows storages, not tensors,
because views share a storage. It holds only weak references to them, so it keeps nothing alive.
Sizes are in bytes.
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
    """Log the allocations and frees of storages while it is entered.

    allocator: a `CachingAllocator` that serves every allocation and free as it happens, or None to
        count the tensors' own bytes.
    card_only: whether only tensors on a simulated GPU count (`memlab.trace.tensors.on_card`).
    script: the user's script; each storage is noted with the line that allocated it. Files in the
        script's folder count as part of the script.
    most: allocations and frees, beyond which the next allocation raises a ValueError; None for no
        limit.
    stage: the phase that inference declares, in place of the one that is found; None in a training.

    A storage that existed before, and is used inside, counts from the beginning. Categories are
    inferred:

    - parameters: storages of `torch.nn.Parameter`
    - gradients: storages of a parameter's `.grad`, once it has been accumulated
    - optimizer_states: tensors in `optimizer.state` after a step
    - activations: allocated in the forward pass and still alive when the backward pass begins, or
      recomputed in the backward pass
    - inputs, buffers: what `watch` was given. A storage that outlives a backward pass and is
      written after it, such as a moving average of the weights, counts as a buffer, too
    - temporary: everything else, including parameters that FSDP gathers from other ranks, while
      they are on this rank

    A tensor that wraps others, as a DTensor wraps the local shard, counts as the wrapped ones.

    Each storage is logged with the running operation and the running module; see `ModuleWatch`.
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
        # `_cdata` of a live UntypedStorage -> (entry in the ledger, weak reference to the storage)
        self._live: dict[int, tuple[Storage, weakref.ref]] = {}
        # Storages of the current forward pass that will be activations if the backward pass sees
        # them alive.
        self._awaiting_backward: set[Storage] = set()
        self._before_backward = 0  # number of storages when the last backward pass began
        self.operation: OpOverload | None = None  # the running operation, which allocates
        self.stream = 0  # number of the stream in which it runs
        self._stepping: Any = None  # the optimizer whose step is running
        self._stepped = False  # whether a step has ended, and nothing was allocated since
        self._watch = ModuleWatch(self._belongs)
        self._token = object()  # marks parameters whose gradients this tracer follows
        self._handles: list[Any] = []
        self._entered = contextlib.ExitStack()

    # ------------------------------------------------------------------ called by the user

    def watch(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:
        """Count these tensors from now on, including those that no operation uses."""
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
        """Replace the module in a tensor's entry by another name, such as that of the KV cache."""
        storage = self._known(tensor)
        if storage:
            storage.module = module

    def _known(self, tensor: torch.Tensor) -> Storage | None:
        """The entry of a tensor's storage, or None."""
        return self._live.get(tensor.untyped_storage()._cdata, (None,))[0]

    def stop(self) -> None:
        """Log no more frees: what is freed from now on counts as alive to the end."""
        self._stopped = True

    # ------------------------------------------------------------------ storages

    def phase(self) -> Phase:
        """The phase of the training, or `stage` in inference."""
        if self.stage is not None:
            return self.stage
        if self._stepping is not None:
            return Phase.STEP
        if torch._C._current_graph_task_id() != -1:  # the autograd engine is running
            return Phase.BACKWARD
        return Phase.ZERO_GRAD if self._stepped else Phase.FORWARD

    def born(self, nbytes: int, category: Category) -> Storage:
        """Enter a storage that the running operation allocates.

        Raises ValueError after more than `most` entries.
        """
        if self.most is not None and len(self) > self.most:
            raise ValueError(f"more than {self.most:,} allocations and frees")
        phase = self.phase()
        module = self._watch.now(in_backward=phase == Phase.BACKWARD)
        storage = self.birth(nbytes, category, phase, module, self.operation, self.stream)
        if self.script is not None:
            storage.line = line_at_work(self.script, sys._getframe())
        return storage

    def died(self, storage: Storage) -> None:
        """Enter the free of a storage, unless `stop` was called."""
        if not self._stopped:
            self._awaiting_backward.discard(storage)
            self.death(storage, self.phase())

    def see(
        self, tensor: torch.Tensor, category: Category | None = None, existed: bool = False
    ) -> None:
        """Enter the storages of a tensor if they are new or were resized, and set their category.

        existed: whether a new one is older than the running operation. category: None infers it.
        """
        module = getattr(tensor, "_memlab_module", None)
        for part in inner_tensors(tensor):
            if not self.card_only or on_card(part):
                self._see_part(part, category, existed, module)

    def _see_part(
        self, tensor: torch.Tensor, category: Category | None, existed: bool, module: str | None
    ) -> None:
        """As `see`, for a tensor that wraps no others. module: that of the tensor around it."""
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
            if nbytes != storage.nbytes:  # resized by an operation, such as aten.resize_
                resized = self.resized(data)
                if resized is None:
                    return
                storage = resized
        if category:
            storage.category = category
            self._awaiting_backward.discard(storage)
        storage.module = module or storage.module

    def resized(self, data: torch.UntypedStorage) -> Storage | None:
        """Enter the resizing of a storage: the old memory is freed, then new memory allocated.

        Returns the new entry; None if the new size is 0, or the storage does not count.
        """
        # Fake tensors have storages on the meta device; any other is one of the host.
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
        """Note the module of a parameter or buffer, for its storage and that of its gradient."""
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
            # It is older than the first entry, so it raises all levels and has no entry. Under an
            # allocator it has one: its block must be allocated at some moment.
            module = self._watch.now(in_backward=self.phase() == Phase.BACKWARD)
            return self.existed(nbytes, category or Category.INPUTS, module, self.operation)
        self._stepped = False
        phase = self.phase()
        # Backward functions run without grad mode, unless `create_graph` is set. Checkpointing
        # enables it to recompute a forward pass.
        recomputed = phase == Phase.BACKWARD and torch.is_grad_enabled()
        usual = Category.ACTIVATIONS if recomputed else Category.TEMPORARY
        storage = self.born(nbytes, category or usual)
        if category is None and phase == Phase.FORWARD and not existed:
            self._awaiting_backward.add(storage)
        return storage

    def _follow(self, data: torch.UntypedStorage, key: int, storage: Storage) -> None:
        # The key is an address, which a new storage may have by the time this is called: its entry
        # stays.
        def died(_: Any, key: int = key, storage: Storage = storage) -> None:
            if self._live.get(key, (None,))[0] is storage:
                del self._live[key]
            self.died(storage)

        self._live[key] = (storage, weakref.ref(data, died))

    # ------------------------------------------------------------------ operations and hooks

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
        """Follow what no operation shows: modules, optimizer steps, FSDP's storages."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            *self._watch.register(),
        ]
        # Not an operator, so no dispatch mode sees it. fully_shard allocates and frees the memory
        # of gathered parameters with it: `alloc_storage` and `free_storage` in
        # torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(data: torch.UntypedStorage, nbytes: int) -> Any:
            before, result = data.nbytes(), resize(data, nbytes)
            if data.nbytes() != before:
                self.resized(data)
            return result

        # Mark the buffers of gathered parameters: they are temporary, though parameters are views
        # of them.
        gather = FSDPParam.init_all_gather_outputs

        def gather_and_tell(shared: Any, *args: Any, **kwargs: Any) -> None:
            gather(shared, *args, **kwargs)
            for tensor in shared.all_gather_outputs:
                tensor.untyped_storage()._memlab_gathered = True
                self.see(tensor, Category.TEMPORARY)

        # Under gradient accumulation, post_backward keeps gradients that it does not reduce.
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
        """Note the arguments of an operation that is about to run."""
        self.operation = None  # new storages among the arguments were not made by it
        given = (*args, kwargs["out"]) if "out" in kwargs else args
        # The argument of lift_fresh was just made by torch.tensor(), so it counts as a result.
        for tensor in tensors_in(given) if func is not torch.ops.aten.lift_fresh.default else ():
            self._see_argument(tensor)
        in_backward = torch._C._current_graph_task_id() != -1
        # The backward pass has begun: what the forward pass left alive are its activations.
        if in_backward and self._awaiting_backward and not torch.is_grad_enabled():
            for storage in self._awaiting_backward:
                storage.category = Category.ACTIVATIONS
            self._awaiting_backward.clear()
            self._before_backward = len(self.storages)
        elif self._before_backward and not in_backward and func._schema.is_mutable and args:
            self._see_written(args[0])
        self.operation = func

    def after(self, func: OpOverload, args: tuple, out: Any, by_autograd: bool = True) -> None:
        """Note the results of an operation that has run.

        by_autograd: whether it may be part of a derivative of PyTorch's own. False if Python code
        called it, as in a user's autograd function.
        """
        if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            if self._done_in_place(func, args, out, by_autograd):
                return
        for tensor in tensors_in([out]):
            self.see(tensor)
        self._see_communication(func, args)

    def came_back(self, tensor: torch.Tensor) -> None:
        """Count a saved tensor as an activation when an unpack hook has moved or remade it."""
        storage = self._known(tensor) if on_card(tensor) else None
        if storage and storage.category == Category.TEMPORARY:
            storage.category = Category.ACTIVATIONS

    def _see_written(self, written: Any) -> None:
        """Count an activation as a buffer if it is written after the backward pass it outlived."""
        for tensor in tensors_in([written]):
            storage = self._known(tensor)
            if storage and storage.number < self._before_backward:
                if storage.category == Category.ACTIVATIONS:
                    storage.category = Category.BUFFERS

    def _see_communication(self, func: OpOverload, args: tuple) -> None:
        """Count the buckets of DistributedDataParallel as gradients."""
        if func.namespace == "c10d" and func._opname == "allreduce_":
            for tensor in args[0]:
                if self.phase() == Phase.BACKWARD:
                    self.see(tensor, Category.GRADIENTS, existed=True)

    def _see_kept(self, group: FSDPParamGroup) -> None:
        """Count the unsharded gradients that FSDP keeps, unreduced, after a micro-batch.

        They are in the unsharded parameters' `.grad`. Before PyTorch 2.15, gradients of another
        dtype than the reduction are in `unsharded_accumulated_grad`
        (`FSDPParam.to_accumulated_grad_if_needed`).
        """
        for shared in group.fsdp_params:
            gradient, own = (
                shared.unsharded_accumulated_grad,
                getattr(shared, "_unsharded_param", None),
            )
            # A parameter that no forward pass has used was never gathered: it has none.
            if gradient is None and own is not None:
                gradient = own.grad
            if gradient is not None:
                self.see(gradient, Category.GRADIENTS)
                self._same_module(gradient, shared.sharded_param)

    def _see_argument(self, tensor: torch.Tensor) -> None:
        storage = self._known(tensor)
        if isinstance(tensor, torch.nn.Parameter) and not is_gathered(tensor.untyped_storage()):
            # A known storage is of another category if the parameter was given other `.data`.
            if storage is None or storage.category != Category.PARAMETERS:
                self.see_parameter(tensor)
            self._follow_gradient(tensor)
        elif storage is None:
            self.see(tensor, existed=True)

    def see_parameter(self, parameter: torch.nn.Parameter) -> None:
        for tensor in (parameter, *constants(parameter)):
            self.see(tensor, Category.PARAMETERS, existed=True)

    def see_weight(self, tensor: torch.Tensor) -> None:
        """Enter a weight that is no `torch.nn.Parameter`, but that an optimizer or code updates."""
        self.see(tensor, Category.PARAMETERS, existed=True)
        if tensor.requires_grad and not tensor._is_view() and tensor.is_leaf:
            self._follow_gradient(tensor)

    def _follow_gradient(self, parameter: Any) -> None:
        if getattr(parameter, "_memlab_token", None) is self._token:
            return
        # An attribute, not a WeakSet: `torch.utils.swap_tensors`, which Module.to() may call,
        # refuses tensors with weak references.
        parameter._memlab_token = self._token
        if parameter.requires_grad and parameter.is_leaf:
            if parameter.grad is not None:
                self.see(parameter.grad, Category.GRADIENTS, existed=True)
            hook = parameter.register_post_accumulate_grad_hook(self._see_gradient)
            self._handles.append(hook)

    def _see_gradient(self, parameter: torch.Tensor, existed: bool = False) -> None:
        if parameter.grad is not None:  # an earlier hook may have used and dropped it
            self.see(parameter.grad, Category.GRADIENTS, existed)
            self._same_module(parameter.grad, parameter)

    def _same_module(self, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        module = getattr(parameter, "_memlab_module", None)
        for part in inner_tensors(tensor):
            storage = self._known(part)
            if module and storage:
                storage.module = module

    def _done_in_place(self, func: OpOverload, args: tuple, out: Any, by_autograd: bool) -> bool:
        """Let a result take over an argument's storage if autograd, untraced, works in place.

        Returns whether it does. PyTorch avoids in-place operations under a dispatch mode; see
        `sole_summand` and `FILLS_ZEROS`.
        """
        if func is torch.ops.aten.add.Tensor:
            taken = sole_summand(args, out, self._live)
        else:
            taken = args[0] if func in FILLS_ZEROS and by_autograd else None
        entry = None if taken is None else self._live.pop(taken.untyped_storage()._cdata, None)
        if entry:
            # The entry follows the result from now on. The weak reference to the argument's storage
            # is dropped with `entry`, so the end of that storage is not logged.
            data = out.untyped_storage()
            self._follow(data, data._cdata, entry[0])
        return bool(entry)

    @property
    def in_step(self) -> bool:
        """Whether an optimizer step is running."""
        return self._stepping is not None

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is not None:  # an inner optimizer, as in ZeroRedundancyOptimizer
            return
        self._stepping = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not isinstance(parameter, torch.nn.Parameter):
                    self.see_weight(parameter)
                # FSDP, not autograd, sets `.grad` of sharded parameters: `foreach_reduce` in
                # torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
                self._see_gradient(parameter, existed=True)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._label_states(optimizer)
        if optimizer is self._stepping:
            self._stepping, self._stepped = None, True

    def _label_states(self, optimizer: Any) -> None:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer = optimizer.optim  # the optimizer of this rank's weights, with their states
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.see(value, Category.OPTIMIZER_STATES, existed=True)
                    self._same_module(value, parameter)


class _EveryOperation(TorchDispatchMode):
    """The dispatch mode that calls a tracer before and after every operation."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self._tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep `TorchDispatchMode` from wrapping `__torch_dispatch__` in `torch._disable_dynamo`.

        Calling the wrapper for every operation takes a tenth of the time.
        """
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(map(is_wrapper_subclass, types)):
            return NotImplemented  # the subclass runs it, and it comes again with inner tensors
        kwargs = kwargs or {}
        self._tracer.before(func, args, kwargs)
        out = func(*args, **kwargs)
        self._tracer.after(func, args, out)
        return out
