"""A card's memory to play with: PyTorch's caching allocator, block by block, on a page."""

from dataclasses import replace

from memlab.gpus import ANY_CARD
from memlab.panels.panel import Panel
from memlab.trace import allocator
from memlab.units import MiB

# The allocator's sizes, by the names that the panels' scripts know.
_NAMES = "MIN_BLOCK SMALL_REQUEST SMALL_SEGMENT MEDIUM_REQUEST MEDIUM_SEGMENT LARGE_ROUND"
SIZES = {name: getattr(allocator, name) for name in _NAMES.split()}
TOY = replace(ANY_CARD, name="a card of 128 MiB", total_memory=128 * MiB, context=16 * MiB)
# Requests that have a button; any other size can be typed.
BUTTONS = [1000, 700 * 1024, 3 * MiB, 8 * MiB, 12 * MiB, 25 * MiB]


class AllocatorSandbox(Panel):
    """Allocate, free and empty the cache: segments and blocks, drawn, and the four figures.

    A toy card of 128 MiB, of which the CUDA context takes 16, so that every block can be seen. The
    rules are those of `memlab.trace.allocator`, and its constants are handed over.
    """

    kind = "sandbox"
    still = (
        "This panel needs scripts. It lets you allocate and free memory by the rules of PyTorch's "
        "caching allocator."
    )

    def data(self) -> dict:
        return {
            "rules": SIZES,
            "total": TOY.total_memory,
            "context": TOY.context,
            "card": TOY.name,
            "sizes": BUTTONS,
        }
