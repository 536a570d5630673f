"""The first line of an answer: whether a training fits a GPU, with what room and what risk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlab.gpus import GPU
from memlab.units import in_unit_of

if TYPE_CHECKING:
    from memlab.predict.fit import Fit, Verdict

TOO_SMALL = 3  # exit status if the GPU is too small


def verdict_line(name: str, card: GPU, verdict: Verdict | Fit) -> str:
    """Say whether something fits a GPU with a limit, and how likely it does not.

    name: what is trained. verdict: with the margin of `memlab.fits`. The chance is the share of
    published runs that took so much more than predicted (`memlab.evidence.shortfall`).
    """
    from memlab.evidence.shortfall import shortfall

    total = card.total_memory
    assert total is not None  # a verdict is for a GPU with a limit
    margin, size, left = (
        in_unit_of(n, total) for n in (verdict.margin, total, abs(total - verdict.needed))
    )
    begin = f"{name} on {card.in_words}: "
    # Three cases: over the GPU's size, within it with the margin, within it but without the margin.
    if verdict.needed > total:
        return f"{begin}does not fit, {left} more than its {size}"
    chance = f"chance that it does not: {shortfall(verdict.needed, total)}"
    if verdict.fits:
        return f"{begin}fits, {left} of {size} left (margin {margin}); {chance}"
    return f"{begin}fits only without the margin of {margin}, {left} of {size} left; {chance}"


def verdict_values(
    card: GPU, verdict: Verdict | Fit | None, fits: bool | None = None
) -> dict[str, Any]:
    """The verdict in bytes, for JSON.

    fits: whether it fits, if that is known although there is no verdict; else None.
    """
    if verdict is None or card.total_memory is None:
        return {"fits": fits}
    from memlab.evidence.shortfall import shortfall

    short = shortfall(verdict.needed, card.total_memory)
    return {
        "fits": verdict.fits,
        "needed": verdict.needed,
        "margin": verdict.margin,
        "total_memory": card.total_memory,
        "left": card.total_memory - verdict.needed,
        "chance_that_it_does_not_fit": short.chance,
        "published_runs": short.runs,
    }


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error is torch.OutOfMemoryError, without importing PyTorch for it."""
    return type(error).__name__ == "OutOfMemoryError"
