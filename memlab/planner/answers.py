"""What traces and the allocator answer about single recipes of a question on one card."""

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

LIKE = GPUS["A100-80GB"]  # how quick a card is that is only bytes


class Answers:
    """The bytes and seconds of recipes on a card. say: told what is being done."""

    def __init__(
        self, question: Question, card: GPU, margin: float, say: Callable[[str], object]
    ) -> None:
        self.question, self.card, self.margin, self.say = question, card, margin, say
        # A card that is only bytes has the links of the one that it is like.
        self.like = card if card.name in GPUS else dataclasses.replace(card, name=LIKE.name)
        link_rate(self.like, question.link)  # or an error
        assert card.total_memory is not None and card.context is not None  # it has a limit
        self.total_memory, self.context = card.total_memory, card.context
        self.room = room(card, margin)
        self._peaks: dict[tuple, int] = {}
        self._seconds: dict[tuple, float | None] = {}
        self._simulated: dict[tuple, Option] = {}
        self._assumed: dict[tuple, tuple[str, ...]] = {}

    def tensors(self, recipe: Recipe) -> int:
        """Bytes of the card that no allocator can be below, context included."""
        key = _key(recipe)
        if key not in self._peaks:
            self.say(f"tracing {described(recipe)}")
            self._peaks[key] = peak_allocated_of(recipe, self.card) + self.context
        return self._peaks[key]

    def log(self, recipe: Recipe) -> Log:
        """What a recipe does to memory, whose seconds and assumptions are remembered."""
        self.say(f"simulating {described(recipe)} on {self.card.name}")
        log = log_of(recipe, self.card)
        key, samples = _key(recipe), recipe.batch_size * recipe.accumulation
        self._assumed[key] = log.assumptions
        try:
            time = step_time(log.work, self.like, samples, self.question.link)
            self._seconds[key] = time.expected
        except ValueError:
            self._seconds[key] = None
        return log

    def time(self, recipe: Recipe) -> float | None:
        """The estimated seconds of a step, as if no state moved between card and host."""
        if _key(recipe) not in self._seconds:
            self.log(recipe)
        return self._seconds[_key(recipe)]

    def seconds(self, recipe: Recipe) -> float | None:
        """The estimated seconds of a step; None where states move, or the host does the step."""
        moves = is_paged(recipe.optimizer) or recipe.optimizer_offload != "none"
        return None if moves else self.time(recipe)

    def at_least(self, recipe: Recipe) -> Option:
        """A recipe by its tensors alone, as if the allocator needed nothing between them."""
        needed, margin = self.tensors(recipe), self.total_memory - self.room
        return Option(recipe, needed, margin, self.total_memory, self.seconds(recipe))

    def simulated(self, recipe: Recipe) -> Option:
        """A recipe as the card's allocator serves it."""
        key = _key(recipe)
        if key not in self._simulated:
            fit = verdict(recipe, self.log(recipe), self.card, self.margin)
            time = self.seconds(recipe)
            self._simulated[key] = Option(recipe, fit.needed, fit.margin, self.total_memory, time)
        return self._simulated[key]

    def with_sizes(self, option: Option) -> Option:
        """The option with its largest micro-batch and its longest sequence, where traces say."""
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
        """As `memlab.predict.fit.largest_size`, of a replica by one card's trace."""
        sized = recipe, self.card, field, self.margin, own_fits
        return largest_size(*sized, log_of=log_of, peak_of=peak_allocated_of)

    def assumed(self, options: Iterable[Option]) -> tuple[str, ...]:
        """What the figures of options assume, in their order."""
        texts_of_options = (self._assumed.get(_key(option.recipe), ()) for option in options)
        return tuple(dict.fromkeys(text for texts in texts_of_options for text in texts))


def has_runs_only(recipe: Recipe) -> bool:
    """Whether each size of a recipe is a run of its own, of seconds.

    The loss has as many parts as the tokens ask for, and the gated delta rule loops over the
    chunks of a sequence.
    """
    return recipe.loss != "whole" or hasattr(models.settings(recipe.model), models.OF_DELTA_RULE)


def _key(recipe: Recipe) -> tuple:
    """What tells the recipes of one question apart."""
    return tuple(value for name, value in vars(recipe).items() if name != "model")
