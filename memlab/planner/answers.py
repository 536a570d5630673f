"""Bytes and seconds of single recipes on one GPU, from traces and from the caching allocator.

The search asks about the same recipe many times, so `Answers` caches every answer.
"""

import dataclasses
from collections.abc import Callable, Iterable

from memlab import models
from memlab.card.links import link_rate
from memlab.card.step_time import step_time
from memlab.gpus import GPU, GPUS
from memlab.planner.result import Option, Question, described, is_paged
from memlab.predict.fit import largest_size, room, verdict, why_no_larger
from memlab.predict.replicas import log_of, peak_allocated_of
from memlab.spec.recipe import Recipe
from memlab.trace.log import Log

LIKE = GPUS["A100-80GB"]  # the GPU whose speed is assumed for one that is given in bytes only


class Answers:
    """Bytes and seconds of recipes for one question on one GPU.

    say: called with a line of text on what is being computed, for the progress bar. room: bytes,
    context included, that a recipe may be predicted to need (`memlab.predict.fit.room`).
    """

    def __init__(
        self, question: Question, card: GPU, margin: float, say: Callable[[str], object]
    ) -> None:
        self.question, self.card, self.margin, self.say = question, card, margin, say
        # Links are looked up by the GPU's name, so one given in bytes takes the name of `LIKE`.
        self.like = card if card.name in GPUS else dataclasses.replace(card, name=LIKE.name)
        link_rate(self.like, question.link)  # raises ValueError for a link that this GPU lacks
        assert card.total_memory is not None and card.context is not None  # callers see to it
        self.total_memory, self.context = card.total_memory, card.context
        self.room = room(card, margin)
        self._peaks: dict[tuple, int] = {}
        self._seconds: dict[tuple, float | None] = {}
        self._simulated: dict[tuple, Option] = {}
        self._assumed: dict[tuple, tuple[str, ...]] = {}

    def tensors(self, recipe: Recipe) -> int:
        """Lower bound in bytes, for any allocator: the peak of allocated blocks plus the context.

        The peak is that of the recipe's trace, found in milliseconds.
        """
        key = _key(recipe)
        if key not in self._peaks:
            self.say(f"tracing {described(recipe)}")
            self._peaks[key] = peak_allocated_of(recipe, self.card) + self.context
        return self._peaks[key]

    def log(self, recipe: Recipe) -> Log:
        """The recipe's log of allocations. Its seconds and assumptions are cached on the way."""
        self.say(f"simulating {described(recipe)} on {self.card.name}")
        log = log_of(recipe, self.card)
        key, samples = _key(recipe), recipe.batch_size * recipe.accumulation
        self._assumed[key] = log.assumptions
        try:
            time = step_time(log.work, self.like, samples, self.question.link)
            self._seconds[key] = time.expected
        except ValueError:  # the data sheet has no rate for this number format, or for PCIe
            self._seconds[key] = None
        return log

    def time(self, recipe: Recipe) -> float | None:
        """Estimated seconds of an optimizer step, as if no state moved between GPU and host.

        None if there is no estimate.
        """
        if _key(recipe) not in self._seconds:
            self.log(recipe)
        return self._seconds[_key(recipe)]

    def seconds(self, recipe: Recipe) -> float | None:
        """Estimated seconds of an optimizer step; None if states are paged or on the host."""
        moves = is_paged(recipe.optimizer) or recipe.optimizer_offload != "none"
        return None if moves else self.time(recipe)

    def at_least(self, recipe: Recipe) -> Option:
        """The recipe as an option by its tensors alone, as if the allocator wasted nothing."""
        needed, margin = self.tensors(recipe), self.total_memory - self.room
        return Option(recipe, needed, margin, self.total_memory, self.seconds(recipe))

    def simulated(self, recipe: Recipe) -> Option:
        """The recipe as an option, replayed through the GPU's caching allocator."""
        key = _key(recipe)
        if key not in self._simulated:
            fit = verdict(recipe, self.log(recipe), self.card, self.margin)
            time = self.seconds(recipe)
            self._simulated[key] = Option(recipe, fit.needed, fit.margin, self.total_memory, time)
        return self._simulated[key]

    def with_sizes(self, option: Option) -> Option:
        """Add the largest micro-batch and the longest sequence that fit, all else being equal.

        An option without a trace for all sizes (`has_runs_only`) comes back unchanged.
        """
        recipe = option.recipe
        if has_runs_only(recipe):
            return option
        self.say(f"looking for the largest sizes of {described(recipe)}")
        batch, _ = self.largest_size(recipe, "batch_size", own_fits=True)
        length, following = self.largest_size(recipe, "seq_len", own_fits=True)
        return dataclasses.replace(
            option,
            largest_batch=batch,
            longest=length,
            longest_ends="" if following else why_no_larger(recipe, "seq_len"),
        )

    def largest_size(self, recipe: Recipe, field: str, own_fits: bool) -> tuple[int, int | None]:
        """As `memlab.predict.fit.largest_size`, with ranks of ddp derived from one GPU's trace."""
        sized = recipe, self.card, field, self.margin, own_fits
        return largest_size(*sized, log_of=log_of, peak_of=peak_allocated_of)

    def assumed(self, options: Iterable[Option]) -> tuple[str, ...]:
        """The assumptions behind the figures of options, each once, in the order of the options."""
        texts_of_options = (self._assumed.get(_key(option.recipe), ()) for option in options)
        return tuple(dict.fromkeys(text for texts in texts_of_options for text in texts))


def has_runs_only(recipe: Recipe) -> bool:
    """Whether each size of a recipe needs a run of its own, which takes seconds.

    The number of events then depends on the sizes, and no trace holds for all of them. A loss in
    parts has more parts for more tokens; the gated delta rule loops over chunks of the sequence.
    """
    return recipe.loss != "whole" or hasattr(models.settings(recipe.model), models.OF_DELTA_RULE)


def _key(recipe: Recipe) -> tuple:
    """A cache key: all fields but the model, which is the same in every recipe of a question."""
    return tuple(value for name, value in vars(recipe).items() if name != "model")
