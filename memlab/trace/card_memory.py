"""The memory of one GPU: PyTorch's allocator with a capacity, its settings and its error message.

Known limitation: `expandable_segments` is the only allocator setting that is simulated. Any other
one is accepted, has no effect, and is listed as an assumption.
"""

import os
import re

from memlab.gpus import GPU
from memlab.trace.allocator import CachingAllocator, CapacityError
from memlab.trace.allocator_blocks import Block

# PyTorch 2.13 reads only the first of these that is set: c10/core/AllocatorConfig.cpp, and
# `CUDAAllocatorConfig::instance` in c10/cuda/CUDAAllocatorConfig.h.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class CardMemory(CachingAllocator):
    """The caching allocator of one GPU; memory of the CUDA context is not available to it.

    reads_environment: whether the environment variables are still to be read. PyTorch reads them
        when it first uses CUDA. Here that is the first allocation on the GPU, so a program may
        set a variable until then.
    settings: the settings text that the program set last. assumptions: a dict to which each
        setting adds a line.
    fraction: the share of the GPU's memory that the process may use, as set by
        `torch.cuda.set_per_process_memory_fraction`.
    observers: functions that are called before an out-of-memory error. Their arguments are those
        of `OutOfMemoryObserver` in c10/cuda/CUDACachingAllocator.h, (device, bytes of the segment,
        bytes of the GPU, free bytes).
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
        """Change the settings of all later allocations; source: the function or variable used.

        Raises ValueError for a value that PyTorch refuses.
        """
        self._read_environment()  # first, so that the variable does not override this call later
        self.settings = text
        # Split at commas outside brackets: `roundup_power2_divisions:[256:1,>:4]` is one setting.
        for setting in filter(None, re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))):
            key, _, value = setting.partition(":")
            if key != "expandable_segments":
                line = f"{source}: {key} is not simulated, the allocator keeps its default"
            elif value not in ("True", "False"):
                raise ValueError(f"{source} has {setting}: allowed are True, False")
            else:
                self.expandable_segments = value == "True"
                line = f"{source}: {setting}, for allocations from then on"
            if setting != "expandable_segments:False":  # the default needs no line
                self.assumptions[line] = None

    def _read_environment(self) -> None:
        # Cleared at once, because `change_settings` below calls this function again.
        reads, self.reads_environment = self.reads_environment, False
        name = next((name for name in VARIABLES if name in os.environ), None)
        if reads and name:
            self.change_settings(os.environ[name], name)

    def set_fraction(self, fraction: float) -> None:
        """Limit the process to this share of the GPU's memory, and to what the context leaves."""
        self.fraction = fraction
        # A share of the total, not of what is free: `setMemoryFraction` in
        # c10/cuda/CUDACachingAllocator.cpp.
        if self.gpu.usable is not None and self.gpu.total_memory is not None:
            self.capacity = min(self.gpu.usable, int(fraction * self.gpu.total_memory))

    def used(self) -> int:
        """Bytes in use on the GPU as the driver counts them, the context included."""
        free, total = self.free_and_total()
        return total - free

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """As `CachingAllocator.allocate`, but raise torch.OutOfMemoryError with PyTorch's message.

        The observers run first.
        """
        try:
            return super().allocate(nbytes, stream)
        except CapacityError as error:
            free, total = self.free_and_total()
            for observer in self.observers:
                observer(0, error.segment, total, free)
            import torch  # here, because a replay that fits does not need it

            raise torch.OutOfMemoryError(self._message(error.segment)) from None

    def free_and_total(self) -> tuple[int, int]:
        """(free bytes, total bytes) of the GPU, as `torch.cuda.mem_get_info` returns them.

        Raises ValueError for a GPU without a memory limit.
        """
        if self.gpu.usable is None or self.gpu.total_memory is None:
            raise ValueError("mem_get_info needs a card with a limit: this simulation has none")
        return self.gpu.usable - self.reserved, self.gpu.total_memory

    def _new_block(self, size: int, small: bool, stream: int) -> Block:
        self._read_environment()
        return super()._new_block(size, small, stream)

    def _message(self, segment: int) -> str:
        """The message of `DeviceCachingAllocator::malloc`, c10/cuda/CUDACachingAllocator.cpp."""
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
    """Bytes as text, after `format_size` in c10/core/Allocator.h."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes > unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
