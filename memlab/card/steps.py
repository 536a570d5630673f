"""Where an optimizer step ends, also where code changes its weights by itself."""

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
    "LBFGS: losses read alike, so each step ends after one iteration; on a card its history grows "
    "to `history_size` pairs as large as the weights"
)


class Steps:
    """The optimizer steps on a card, and the work of each.

    made: how many have ended. on_step_by_hand: is called where one without an optimizer ends.
    """

    def __init__(self, tracer: Tracer, work: WorkLog):
        self.made = 0
        self.on_step_by_hand = lambda: None
        self._tracer, self._work = tracer, work
        # Whether weights were changed since a backward pass began; None before one.
        self._by_hand: bool | None = None
        self._in_backward = False  # whether by its own hooks

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the steps of optimizers; after the tracer's own hook, which tells the outermost."""

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not self._tracer.in_step:
                self._ended(optimizer)
            if isinstance(optimizer, torch.optim.LBFGS):
                self._tracer.assumptions[LBFGS] = None

        hook = register_optimizer_step_post_hook(stepped)
        try:
            yield
        finally:
            hook.remove()

    def _ended(self, optimizer: torch.optim.Optimizer | None) -> None:
        """The work of a step ends here, or with the backward pass that is under way."""
        if torch._C._current_graph_task_id() != -1:
            self._work.end_step_in_backward()
        else:
            self._work.end_step(optimizer)
        self.made += 1
        self._by_hand = None

    def begin_update(self) -> None:
        """The gradients of a step are there; what follows clips and applies them."""
        self._tracer.mark(Marker.UPDATE)
        self._work.begin_update()

    def end_by_hand(self) -> None:
        """Weights that were changed in place after a backward pass made a step."""
        if self._by_hand:
            self._ended(None)
            self.on_step_by_hand()

    def follow_by_hand(self, func: OpOverload, args: tuple, tensors: list[torch.Tensor]) -> None:
        """The change of one weight begins such a step, the next backward pass ends it.

        Where a hook changes weights as soon as they have their gradients, the pass's end ends it.
        """
        for tensor in tensors:
            # A view that was made under no_grad may not be asked for its graph.
            if tensor.requires_grad and not tensor._is_view() and tensor.is_leaf:
                # FSDP writes what it gathers anew in every micro-batch: no step.
                data: Any = tensor.untyped_storage()
                if not is_gathered(data):
                    data._memlab_weight = True
        in_backward = torch._C._current_graph_task_id() != -1
        if self._by_hand and in_backward != self._in_backward:
            self.end_by_hand()
        if in_backward and self._by_hand is None:
            self._by_hand = False
        if self._by_hand is not None and _writes(func) and not self._tracer.in_step:
            for tensor in tensors_in(args[:1]):
                if hasattr(tensor.untyped_storage(), "_memlab_weight"):
                    self._by_hand, self._in_backward = True, in_backward
                    self._tracer.see_weight(tensor)


@functools.cache
def _writes(func: OpOverload) -> bool:
    """Whether an operator changes values: `set_` only gives a tensor another storage."""
    return func._schema.is_mutable and func._opname != "set_"
