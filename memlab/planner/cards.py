"""The planner's answer for several GPUs: which one to choose."""

from dataclasses import dataclass

from tabulate import tabulate

from memlab.planner.result import WAYS, Option, Question, name_of_model, plain, wrapped
from memlab.units import gib

# The GPUs of all sizes that people rent or buy most. A plan without a GPU looks for the smallest of
# them; a plan where nothing fits proposes a larger one.
LADDER = "RTX-3060 T4 L4 RTX-4090 RTX-5090 A100-40GB L40S A100-80GB H100 H200 B200".split()


@dataclass(frozen=True)
class Cards:
    """The planner's answer for several GPUs.

    options: GPU name -> way -> the best option there, from the smallest GPU up.
    smallest: way -> name of the smallest GPU on which the way fits, or None.
    assumptions: as in `Plan`.
    """

    question: Question
    options: dict[str, dict[str, Option]]
    smallest: dict[str, str | None]
    assumptions: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether any way fits on any of the GPUs."""
        return any(self.smallest.values())

    def as_dict(self) -> dict:
        """Plain JSON values."""
        values = vars(self) | {"fits": bool(self), "cards": self.options}
        del values["options"]
        return plain(values)

    def __str__(self) -> str:
        asked = self.question
        head = (
            f"{name_of_model(asked.model)}: {asked.effective_batch} sequences of "
            f"{asked.seq_len:,} tokens per step"
        )
        rows = [
            [card, *(_cell(ways.get(way)) for way in asked.ways)]
            for card, ways in self.options.items()
        ]
        heads = ["card", *(WAYS[way] for way in asked.ways)]
        table = tabulate(rows, heads, disable_numparse=True)
        words = []
        for way, card in self.smallest.items():
            if card is None:
                words.append(f"{WAYS[way]} fits none of them.")
            else:
                words.append(f"Smallest for {WAYS[way]}: {card}, with {self.options[card][way]}")
        assumed = [f"Assumed: {assumption}." for assumption in self.assumptions]
        return "\n".join(map(wrapped, [head, *words, "", table, *assumed]))


def _cell(option: Option | None) -> str:
    if option is None:
        return "not possible"
    if option.missing:
        return f"lacks {'over ' * option.at_least}{gib(option.missing)}"
    speed = f", {option.rate()}/s" if option.seconds else ""
    return f"{gib(option.needed)}{speed}"
