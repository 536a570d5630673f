"""The first line of an answer: what fits which card, how much is left, and how likely it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlab.gpus import GPU
from memlab.units import in_unit_of

if TYPE_CHECKING:
    from memlab.predict.fit import Fit, Verdict

TOO_SMALL = 3  # the exit status of what does not fit


def verdict_line(name: str, card: GPU, verdict: Verdict | Fit) -> str:
    """Whether something fits a card with a limit, and the share of published runs that would not.

    name: what is trained. verdict: with the margin of `memlab.fits`.
    """
    from memlab.evidence.shortfall import shortfall

    total = card.total_memory
    assert total is not None  # it has a limit
    margin, size, left = (
        in_unit_of(n, total) for n in (verdict.margin, total, abs(total - verdict.needed))
    )
    begin = f"{name} on {card.in_words}: "
    if verdict.needed > total:
        return f"{begin}does not fit, {left} more than its {size}"
    chance = f"chance that it does not: {shortfall(verdict.needed, total)}"
    if verdict.fits:
        return f"{begin}fits, {left} of {size} left (margin {margin}); {chance}"
    return f"{begin}fits without the margin of {margin} only, {left} of {size} left; {chance}"


def verdict_values(
    card: GPU, verdict: Verdict | Fit | None, fits: bool | None = None
) -> dict[str, Any]:
    """The same in bytes, for JSON. fits: what is known of it without a verdict."""
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
    """Whether it is torch.OutOfMemoryError; an answer that needs no PyTorch does not import it."""
    return type(error).__name__ == "OutOfMemoryError"
