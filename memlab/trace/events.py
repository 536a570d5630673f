"""The events of an allocation log: allocations, frees and markers, without storage numbers.

So logs of different runs and depths can be compared. An allocation is described by its size,
category, phase, module and operation. A free refers to that description, and says which of the live
storages with the same description it frees.
"""

from enum import Enum
from typing import NamedTuple

from memlab.footprint import Category, Phase
from memlab.trace.reductions import Reduction

OUTSIDE = "outside any module"


class Alloc(NamedTuple):
    """A storage of `nbytes` bytes is allocated, by a PyTorch operation and in a module.

    module: path of the module, with `*` for the layer's number unless layers are distinguished.
    stream: the CUDA stream that the memory belongs to, 0 for the default one. item: bytes of one
    element. reduction: for the buffer of a sum along rows, that sum. The bytes of such a buffer
    depend on the GPU.
    """

    nbytes: int
    category: Category
    phase: Phase
    module: str
    operation: str
    stream: int = 0
    item: int = 1
    reduction: Reduction | None = None


class Free(NamedTuple):
    """One of the live storages that were allocated as `alloc` is freed.

    which: its index among them, counted from the oldest (0, 1, ...) or from the youngest (-1, -2,
        ...), whichever is nearer. Storages of the forward pass that the backward pass frees always
        count from the youngest. Weights that are replaced one by one, as by a cast to another
        dtype, count from the index of the last one replaced. Weights that stay may lie between.
    """

    alloc: Alloc
    phase: Phase
    which: int


class Marker(Enum):
    """RESET: the measured part begins. EMPTY_CACHE: cached blocks return to the device.

    UPDATE: the gradients of a step are complete. UPDATED: they have been clipped and applied.
    """

    RESET = "reset"
    EMPTY_CACHE = "empty cache"
    UPDATE = "update"
    UPDATED = "updated"


TraceEvent = Alloc | Free | Marker
