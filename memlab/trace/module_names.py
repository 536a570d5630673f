"""Which module is at work: in the forward pass by hooks, in the backward pass by its nodes."""

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

    A module's name is its path in the outermost module that was called with it, `bert.pooler`;
    the outermost one has its class's name, and one that was made during a call, as loss
    functions are, its class's name after the caller's. In the backward pass a node belongs to
    the module whose forward pass made it: PyTorch numbers the nodes as they are made, so it is
    enough to note the next number at each call and at each return.

    named: called with each parameter or buffer and the name of its module, as soon as it is known.
    """

    def __init__(self, named: Callable[[torch.Tensor, str], None]):
        self._named = named
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._calls: list[str] = []
        self._numbers, self._names_from = [0], [OUTSIDE]

    def register(self) -> list:
        """Begin to follow; the handles end it."""
        return [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def name_all(self, root: torch.nn.Module) -> None:
        """Give every module of `root` its path, and its tensors its name."""
        caller = f"{self._calls[-1]}." if self._calls else ""
        for path, module in root.named_modules():
            name = self._names[module] = caller + (path or type(root).__name__)
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        self._named(tensor, name)

    def now(self, in_backward: bool) -> str:
        """The name of the module that is at work."""
        if self._calls:  # also when a checkpointed module runs again
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
        if self._calls:  # it was entered while the hooks were there
            self._calls.pop()
            self._note()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._names_from.append(self._calls[-1] if self._calls else OUTSIDE)
