"""Find the running module: by hooks in the forward pass, by autograd nodes in the backward pass."""

import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from memlab.trace.events import OUTSIDE


class ModuleWatch:
    """Follows the calls of every module while its hooks are registered.

    A module's name is its path in the outermost module that was called, such as `bert.pooler`. The
    outermost module itself has the name of its class. A module that is first seen during a call, as
    loss functions are, has the name of its class after that of the caller.

    In the backward pass, a node belongs to the module whose forward pass made it. PyTorch numbers
    nodes in the order in which they are made (torch/csrc/autograd/node.h, NOTE [ Sequence Number]).
    So it is enough to note the next number at each call and each return.

    named: called with each parameter or buffer and the name of its module, as soon as it is known.

    Known limitation: the numbers are per thread, so a forward pass in several threads mixes them.
    """

    def __init__(self, named: Callable[[torch.Tensor, str], None]):
        self._named = named
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._calls: list[str] = []
        # The module of a node: `_names_from[i]` for sequence numbers from `_numbers[i]` on.
        self._numbers, self._names_from = [0], [OUTSIDE]

    def register(self) -> list:
        """Start to follow calls; removing the returned handles ends it."""
        # always_call: a forward pass that raises is left, too.
        return [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def name_all(self, root: torch.nn.Module) -> None:
        """Name every module in `root` by its path, and pass on its parameters and buffers."""
        caller = f"{self._calls[-1]}." if self._calls else ""
        for path, module in root.named_modules():
            name = self._names[module] = caller + (path or type(root).__name__)
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        self._named(tensor, name)

    def now(self, in_backward: bool) -> str:
        """The name of the module that is running, or `OUTSIDE`."""
        if self._calls:  # also in the backward pass, while a checkpointed module runs again
            return self._calls[-1]
        node = torch._C._current_autograd_node() if in_backward else None
        if node is None:
            return OUTSIDE
        return self._names_from[bisect_right(self._numbers, node._sequence_nr()) - 1]

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if module not in self._names:
            self.name_all(module)
        self._calls.append(self._names[module])
        self._note()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._calls:  # empty if the call began before the hooks were registered
            self._calls.pop()
            self._note()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._names_from.append(self._calls[-1] if self._calls else OUTSIDE)
