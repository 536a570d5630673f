"""Where an optimizer step ends, with an optimizer or in code that updates its weights by hand.

PyTorch's optimizers report their steps through a hook. A step by hand is recognized from the
operations: weights that are written in place after a backward pass, up to the next backward pass.
An update inside the backward pass, by hooks of the weights, ends with that pass.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlab.card.op_work import WorkLog
from memlab.trace.events import Marker
from memlab.trace.tensors import is_gathered, tensors_in
from memlab.trace.tracer import Tracer

LBFGS = (
    "LBFGS: all losses read the same, so each step ends after one iteration; on a card its history "
    "grows to `history_size` pairs as large as the weights"
)


class Steps:
    """The optimizer steps of a run, and the work of each.

    made: how many steps have ended.
    on_step_by_hand: a callback for the end of each step without an optimizer.
    """

    def __init__(self, tracer: Tracer, work: WorkLog):
        self.made = 0
        self.on_step_by_hand = lambda: None
        self._tracer, self._work = tracer, work
        # None: no backward pass since the last step. False: gradients exist, or are being
        # computed. True: weights have been written since.
        self._by_hand: bool | None = None
        self._in_backward = False  # whether they were written inside the backward pass, by hooks

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the steps of optimizers inside the block.

        Enter it after `Tracer.hooks`: hooks run in the order of registration, and the tracer's hook
        clears `in_step` at the end of the outermost optimizer.
        """

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not self._tracer.in_step:  # an optimizer that wraps another steps once
                self._ended(optimizer)
            if isinstance(optimizer, torch.optim.LBFGS):
                self._tracer.assumptions[LBFGS] = None

        hook = register_optimizer_step_post_hook(stepped)
        try:
            yield
        finally:
            hook.remove()

    def _ended(self, optimizer: torch.optim.Optimizer | None) -> None:
        """End a step, and its work, here or with the running backward pass."""
        if torch._C._current_graph_task_id() != -1:  # inside the backward pass
            self._work.end_step_in_backward()
        else:
            self._work.end_step(optimizer)
        self.made += 1
        self._by_hand = None

    def begin_update(self) -> None:
        """Note that all gradients of a step exist: what follows clips and applies them."""
        self._tracer.mark(Marker.UPDATE)
        self._work.begin_update()

    def end_by_hand(self) -> None:
        """End a step if weights were written in place since the last backward pass."""
        if self._by_hand:
            self._ended(None)
            self.on_step_by_hand()

    def follow_by_hand(self, func: OpOverload, args: tuple, tensors: list[torch.Tensor]) -> None:
        """Follow updates by hand: called before every operation on the GPU.

        Writing a weight after a backward pass begins a step, and the next backward pass ends it. If
        hooks write weights as soon as these have their gradients, the end of that pass ends it.
        """
        for tensor in tensors:
            # The weights are the leaves that require a gradient. `_is_view` comes before `is_leaf`,
            # because PyTorch may refuse the latter for a view that was made under no_grad.
            if tensor.requires_grad and not tensor._is_view() and tensor.is_leaf:
                # FSDP writes the gathered parameters in every micro-batch, which is no step.
                data: Any = tensor.untyped_storage()
                if not is_gathered(data):
                    data._memlab_weight = True
        in_backward = torch._C._current_graph_task_id() != -1
        # Written outside, and a backward pass begins; or written inside, and the pass is over.
        if self._by_hand and in_backward != self._in_backward:
            self.end_by_hand()
        if in_backward and self._by_hand is None:
            self._by_hand = False
        # The mark is on the storage, so that views and `weight.data` count as the weight.
        if self._by_hand is not None and _writes(func) and not self._tracer.in_step:
            for tensor in tensors_in(args[:1]):
                if hasattr(tensor.untyped_storage(), "_memlab_weight"):
                    self._by_hand, self._in_backward = True, in_backward
                    self._tracer.see_weight(tensor)


@functools.cache
def _writes(func: OpOverload) -> bool:
    """Whether an operator writes values. `set_` only gives a tensor another storage."""
    return func._schema.is_mutable and func._opname != "set_"
