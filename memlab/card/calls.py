"""What Python code has called, thread by thread: it says where a new tensor lies."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from memlab.card.placement import is_cuda_device
from memlab.trace.tensors import on_card, tensors_in


class Call(NamedTuple):
    """What Python code called: its arguments, and whether it named the host as the device.

    host_dtype: what it makes of this dtype is for the host, beside what it makes for the card.
    """

    args: tuple
    kwargs: dict
    names_host: bool = False
    host_dtype: torch.dtype | None = None


class Calls(threading.local):
    """current: what is called in this thread; None in the autograd engine, and between calls."""

    current: Call | None = None

    @contextlib.contextmanager
    def at_work(self, call: Call | None) -> Iterator[None]:
        """Inside, this is what Python code has called."""
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
        """Whether the result of an operation on these tensors, for this device, is the card's."""
        call = self.current
        if device is not None:
            if device.type == "meta":
                return False
            if is_cuda_device(device):
                return True
            if call is not None and call.names_host:
                return False
        if tensors:
            return any(map(on_card, tensors))
        # PyTorch's own code makes a tensor beside others, whose device it takes for the cpu.
        if call is None:
            return in_backward
        if dtype is not None and dtype is call.host_dtype:
            return False
        return any(map(on_card, tensors_in((*call.args, *call.kwargs.values()))))
