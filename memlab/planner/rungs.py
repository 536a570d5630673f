"""What a plan tries before it names a larger card."""

from __future__ import annotations

from memlab.gpus import GPU
from memlab.planner.result import Question
from memlab.planner.space import Combination, is_here

# The rungs before a larger card, which train every weight: gradients and AdamW's states on the
# host, at a cost in time alone; then weights in bf16, where small updates are rounded away, states
# in 8 bits that leave the card, and a step as each gradient comes.
UNCLIPPED = {"max_grad_norm": 0.0}
RUNGS = (
    (
        Combination("full", "bf16-amp", "adamw_torch_fused", checkpointing=True),
        UNCLIPPED | {"optimizer_offload": "gradients"},
        "torchao",
    ),
    (
        Combination("full", "bf16", "paged_adamw_8bit", checkpointing=True),
        UNCLIPPED | {"step_in_backward": True},
        "bitsandbytes",
    ),
)


def rungs(question: Question, card: GPU) -> list[tuple[Combination, dict[str, object]]]:
    """Those of `RUNGS` that may be tried: of one card, in full, in bf16, with their package."""
    asked = "full" in question.ways and question.ranks == 1
    if not asked or "bfloat16" not in card.native_dtypes:
        return []
    return [(one, changes) for one, changes, package in RUNGS if is_here(package)]
