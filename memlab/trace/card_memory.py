"""The card's memory: PyTorch's allocator with a limit, and what it says when there is no room."""

import os
import re

from memlab.gpus import GPU
from memlab.trace.allocator import CachingAllocator, CapacityError
from memlab.trace.allocator_blocks import Block

# The first that is set counts, alone: so does PyTorch 2.13 (c10/core/AllocatorConfig.cpp).
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class CardMemory(CachingAllocator):
    """The allocator of one card, whose context is not its to give.

    reads_environment: whether the environment still says how it is set. PyTorch reads it when it
        first uses CUDA; here that is the first allocation on the card, so a program may set the
        variable until then.
    settings: as the program said them last. assumptions: a dict that takes a line for each.
    fraction: the part of the card that the process may take, as
        `torch.cuda.set_per_process_memory_fraction` sets it.
    observers: functions that are called before an error, as `OutOfMemoryObserver` of
        c10/cuda/CUDACachingAllocator.h: (device, bytes, bytes of the card, free bytes).
    """

    reads_environment = False
    settings = ""
    fraction = 1.0

    def __init__(self, gpu: GPU, statistics: bool = True, expandable_segments: bool = False):
        super().__init__(gpu.usable, statistics, expandable_segments, gpu.total_memory)
        self.gpu = gpu
        self.observers: list = []
        self.assumptions: dict[str, None] = {}

    def change_settings(
        self, text: str, source: str = "torch.cuda.memory._set_allocator_settings"
    ) -> None:
        """Set what is allocated from now on, as a function of PyTorch or a variable does.

        Raises ValueError for a value that PyTorch refuses.
        """
        self._read_environment()
        self.settings = text
        for setting in filter(None, re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))):
            key, _, value = setting.partition(":")
            if key != "expandable_segments":
                line = f"{source}: {key} is not simulated, the allocator has its default"
            elif value not in ("True", "False"):
                raise ValueError(f"{source} has {setting}: allowed are True, False")
            else:
                self.expandable_segments = value == "True"
                line = f"{source}: {setting}, in what is allocated from then on"
            if setting != "expandable_segments:False":
                self.assumptions[line] = None

    def _read_environment(self) -> None:
        reads, self.reads_environment = self.reads_environment, False
        name = next((name for name in VARIABLES if name in os.environ), None)
        if reads and name:
            self.change_settings(os.environ[name], name)

    def set_fraction(self, fraction: float) -> None:
        """Take no more than this part of the card from now on, and no more than there is."""
        self.fraction = fraction
        if self.gpu.usable is not None and self.gpu.total_memory is not None:
            self.capacity = min(self.gpu.usable, int(fraction * self.gpu.total_memory))

    def used(self) -> int:
        """Bytes of the card that are not free, as the driver counts them."""
        free, total = self.free_and_total()
        return total - free

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """As `CachingAllocator.allocate`; raises torch.OutOfMemoryError in PyTorch's words."""
        try:
            return super().allocate(nbytes, stream)
        except CapacityError as error:
            free, total = self.free_and_total()
            for observer in self.observers:
                observer(0, error.segment, total, free)
            import torch  # a replay that ends well can spare it

            raise torch.OutOfMemoryError(self._message(error.segment)) from None

    def free_and_total(self) -> tuple[int, int]:
        """Bytes free on the card and its size, as `torch.cuda.mem_get_info` gives them."""
        if self.gpu.usable is None or self.gpu.total_memory is None:
            raise ValueError("mem_get_info needs a card with a limit: this simulation has none")
        return self.gpu.usable - self.reserved, self.gpu.total_memory

    def _new_block(self, size: int, small: bool, stream: int) -> Block:
        self._read_environment()
        return super()._new_block(size, small, stream)

    def _message(self, segment: int) -> str:
        """PyTorch's words: c10/cuda/CUDACachingAllocator.cpp."""
        free, total = self.free_and_total()
        allowed = f"{_size(int(self.fraction * total))} allowed; " if self.fraction < 1 else ""
        return (
            f"CUDA out of memory. Tried to allocate {_size(segment)}. GPU 0 has a total capacity "
            f"of {_size(total)} of which {_size(free)} is free. Including non-PyTorch memory, "
            f"this process has {_size(total - free)} memory in use. {allowed}"
            f"Of the allocated memory {_size(self.allocated)} is allocated by PyTorch, and "
            f"{_size(self.reserved - self.allocated)} is reserved by PyTorch but unallocated. If "
            "reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
            "See documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def _size(nbytes: int) -> str:
    """Bytes in the words of the allocator's `format_size`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes > unit or (unit == 2**10 and nbytes == unit):
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
