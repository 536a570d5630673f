"""The words of a log without storage numbers.

A birth is described by size, category, phase, module and operation; a death names that description,
and which of the equal ones dies.
"""

from enum import Enum
from typing import NamedTuple

from memlab.footprint import Category, Phase
from memlab.trace.reductions import Reduction

OUTSIDE = "outside any module"


class Alloc(NamedTuple):
    """A storage of `nbytes` bytes is made, by an operation of PyTorch and in a module.

    module: its path, with `*` for the number of its layer unless layers are told apart. stream: the
    CUDA stream whose memory it is, 0 for the default one. item: bytes of one of its elements.
    reduction: the sum that it is the buffer of, if it is one; its bytes depend on the card.
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
    """One of the storages born like `birth` dies.

    which: its place among those that live, from the oldest (0, 1, ...) or the youngest (-1, -2,
        ...), whichever is nearer, but of what the forward pass left to the backward pass always
        from the youngest, and of weights that are replaced, as when they are cast to another dtype,
        from where the last of them died: between those that are cast others may stay.
    """

    birth: Alloc
    phase: Phase
    which: int


class Marker(Enum):
    """RESET: the measured stretch begins. EMPTY_CACHE: cached blocks go back to the device.

    UPDATE and UPDATED: the gradients of a step are there, and what clips and applies them is over.
    """

    RESET = "reset"
    EMPTY_CACHE = "empty cache"
    UPDATE = "update"
    UPDATED = "updated"


TraceEvent = Alloc | Free | Marker
