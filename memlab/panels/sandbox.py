"""The sandbox panel: PyTorch's caching allocator on a toy GPU, block by block."""

from dataclasses import replace

from memlab.gpus import ANY_CARD
from memlab.panels.panel import Panel
from memlab.trace import allocator
from memlab.units import MiB

# The allocator's constants, under the names that the scripts of several panels use.
_NAMES = "MIN_BLOCK SMALL_REQUEST SMALL_SEGMENT MEDIUM_REQUEST MEDIUM_SEGMENT LARGE_ROUND"
SIZES = {name: getattr(allocator, name) for name in _NAMES.split()}
TOY = replace(ANY_CARD, name="a card of 128 MiB", total_memory=128 * MiB, context=16 * MiB)
# Sizes in bytes that have a button; a reader can type any other. They meet each rule of the
# allocator: small and large pool, segments of 20 MiB, and segments of the request's own size.
BUTTONS = [1000, 700 * 1024, 3 * MiB, 8 * MiB, 12 * MiB, 25 * MiB]


class AllocatorSandbox(Panel):
    """Allocate, free and empty the cache; see the segments, the blocks and four figures.

    The toy GPU has 128 MiB, of which the CUDA context takes 16, so that every block is visible. The
    script repeats the rules of `memlab.trace.allocator` and gets its constants from there.
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
