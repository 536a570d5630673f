"""A card's memory to play with: PyTorch's caching allocator, block by block, on a page."""

from dataclasses import replace

from memlab.gpus import ANY_CARD, GPU, find_gpu
from memlab.panels.panel import Panel
from memlab.trace import allocator
from memlab.units import MiB

# The allocator's sizes, by the names that the panels' scripts know.
_NAMES = "MIN_BLOCK SMALL_REQUEST SMALL_SEGMENT MEDIUM_REQUEST MEDIUM_SEGMENT LARGE_ROUND"
SIZES = {name: getattr(allocator, name) for name in _NAMES.split()}
TOY = replace(ANY_CARD, name="a card of 128 MiB", total_memory=128 * MiB, context=16 * MiB)


class AllocatorSandbox(Panel):
    """Allocate, free and empty the cache: segments and blocks, drawn, and the four figures.

    card: a name ("T4"), a number of bytes that PyTorch may take, or a GPU; without one a toy card
        of 128 MiB, of which the CUDA context takes 16, so that every block can be seen.
    sizes: bytes of the requests that have a button; any other size can be typed.

    The rules are those of `memlab.trace.allocator`, and its constants are handed over.

    Raises ValueError for a card without a limit, for an unknown one, and for sizes that are no
    whole numbers from 1.
    """

    kind = "sandbox"
    still = (
        "This panel needs scripts. It lets you allocate and free memory by the rules of PyTorch's "
        "caching allocator."
    )

    def __init__(
        self,
        card: str | int | GPU = TOY,
        sizes: tuple[int, ...] = (1000, 700 * 1024, 3 * MiB, 8 * MiB, 12 * MiB, 25 * MiB),
    ):
        self.card, self.sizes = find_gpu(card), tuple(sizes)
        if self.card.total_memory is None:
            raise ValueError(f"card is {card!r}: allowed are cards with a limit")
        wrong = [n for n in self.sizes if not isinstance(n, int) or n < 1]
        if wrong:
            raise ValueError(f"sizes holds {wrong[0]!r}: allowed are whole numbers from 1")

    def data(self) -> dict:
        return {
            "rules": SIZES,
            "total": self.card.total_memory,
            "context": self.card.context or 0,
            "card": self.card.name,
            "sizes": list(self.sizes),
        }
