"""Which function Python code has called in each thread. It decides where a new tensor is placed.

To PyTorch, every fake tensor is a CPU tensor. So the C++ code of a function on GPU tensors creates
its temporaries with `device="cpu"`. Only the arguments of the Python call tell whether such a
tensor belongs to the GPU or to the host.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from memlab.card.placement import is_cuda_device
from memlab.trace.tensors import on_card, tensors_in


class Call(NamedTuple):
    """The arguments of a Python call, and whether the caller named the host as the device.

    host_dtype: tensors of this dtype that the function creates are host tensors, even if its
    other results lie on the GPU.
    """

    args: tuple
    kwargs: dict
    names_host: bool = False
    host_dtype: torch.dtype | None = None


class Calls(threading.local):
    """The call in progress in this thread.

    current: the call; None between calls, and inside the autograd engine.
    """

    current: Call | None = None

    @contextlib.contextmanager
    def at_work(self, call: Call | None) -> Iterator[None]:
        """Make `call` the current one inside the block."""
        before, self.current = self.current, call
        try:
            yield
        finally:
            self.current = before

    def go_to_card(
        self,
        tensors: list[torch.Tensor],
        device: torch.device | None,
        dtype: torch.dtype | None,
        in_backward: bool,
    ) -> bool:
        """Whether the result of an operation on `tensors` lies on the GPU.

        device, dtype: the operation's own keyword arguments, or None.
        """
        call = self.current
        if device is not None:
            if device.type == "meta":
                return False
            if is_cuda_device(device):
                return True
            # A "cpu" alone proves nothing: it may be `tensor.options()` of a fake tensor in C++.
            if call is not None and call.names_host:
                return False
        if tensors:
            return any(map(on_card, tensors))
        # PyTorch's C++ code calls a factory function, such as `at::empty`. The new tensor belongs
        # where the arguments of the Python call lie.
        if call is None:
            return in_backward  # the engine's own tensors, as zeros for an undefined gradient
        if dtype is not None and dtype is call.host_dtype:
            return False
        return any(map(on_card, tensors_in((*call.args, *call.kwargs.values()))))
