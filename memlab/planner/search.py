"""Which recipe trains a model on a card: traces look everywhere, the allocator confirms.

Of each combination of way, precision, optimizer and checkpointing that may be the best of its tier
the search finds the largest micro-batch whose tensors fit, by the peak of its trace
(`memlab.predict.traces`), in milliseconds a size. The best are replayed by the card's allocator,
with a smaller micro-batch where it runs out of memory, until the best one is a replayed one. So
all bytes of an answer are those of `memlab.fits`, but for ranks of ddp (`memlab.predict.replicas`).

A combination is left out where it cannot be better: where its weights, gradients and states alone
are too large; with checkpointing where all sequences fit at once without it; and with smaller
states, or parts of them, where they save less than what a larger micro-batch lacks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from memlab.gpus import GPU, GPUS
from memlab.planner.advice import decision, switches
from memlab.planner.answers import LIKE, Answers, has_runs_only
from memlab.planner.cards import LADDER, Cards
from memlab.planner.choice import groups, plainest
from memlab.planner.remedies import NO_CARD, last_resorts, remedies
from memlab.planner.result import WAYS, Option, Plan, Question, is_paged
from memlab.planner.space import Combination, Recipes, computes
from memlab.predict.fit import MARGIN, limited
from memlab.predict.progress import Progress
from memlab.predict.recipe_log import gc_frozen

if TYPE_CHECKING:
    from memlab.models import Model

    Named = GPU | str | int  # a card

SAME_ROOM = 0.02  # of a card; what saves less than that leaves no more room worth a row


@overload
def plan(
    model: Model, gpu: Named, seq_len: int = 512, effective_batch: int = 16, **more: Any
) -> Plan: ...
@overload
def plan(
    model: Model, gpu: None = None, seq_len: int = 512, effective_batch: int = 16, **more: Any
) -> Cards: ...
@overload
def plan(
    model: Model, gpu: Sequence[Named], seq_len: int = 512, effective_batch: int = 16, **more: Any
) -> Plan | Cards: ...
def plan(
    model: Model,
    gpu: Named | Sequence[Named] | None = None,
    seq_len: int = 512,
    effective_batch: int = 16,
    **more: Any,
) -> Plan | Cards:
    """How to train a model on a card, or which card to take.

    gpu: a card as for `fits`; or several, or None for `LADDER`, which asks for the smallest card
    of each way. model, seq_len (tokens), effective_batch (sequences of an optimizer
    step) and more: the fields of `memlab.planner.result.Question`; margin: as in `fits`.

    What fits is decided by `fits` and its margin; which is fastest by estimated seconds. A card
    given in bytes is taken as quick as an A100. With several ranks, on cards of one kind, `ddp`,
    `zero2` and `zero3` are looked at.

    Where no recipe of a tier fits with the model's own loss, the most sparing is tried with the
    loss in parts, which changes no result.

    Raises ValueError in one line for what cannot be asked.
    """
    margin = more.pop("margin", MARGIN)
    question = Question(model, seq_len, effective_batch, **more)
    named: Sequence[Named] = LADDER
    if isinstance(gpu, Sequence) and not isinstance(gpu, str):
        named = gpu
    elif gpu is not None:
        named = [gpu]
    cards = [_with_rates(limited(name, margin)) for name in named]
    if not cards:
        raise ValueError(f"gpu is {gpu!r}: allowed are {', '.join(GPUS)}, or a number of bytes")
    if question.ranks > 1 and len(cards) > 1:
        raise ValueError(f"ranks is {question.ranks} and gpu names {len(cards)} cards: name one")
    if len(cards) > 1:
        with gc_frozen():
            return _which_card(question, cards, margin)
    search = Search(question, cards[0], margin)
    with gc_frozen(), Progress(desc="planning", delay=0, bar_format=BAR) as search.progress:
        return search.plan()


BAR = "{desc} [{elapsed}]"


class Search:
    """The search for one question on one card.

    answers: what is known of single recipes. options: the largest micro-batch of each combination
    that fits. lacks: of each that was asked, the bytes that the next larger micro-batch lacks, 0
    where there is none. traced: those of them that are not too large without any activations.
    replayed: those whose option the allocator has confirmed.
    """

    def __init__(
        self, question: Question, card: GPU, margin: float, progress: Progress | None = None
    ) -> None:
        self.question, self.card, self.margin, self.progress = question, card, margin, progress
        self.answers = Answers(question, card, margin, self.say)
        self.recipes = Recipes(question, card)
        self.options: dict[Combination, Option] = {}
        self.lacks: dict[Combination, int] = {}
        self.traced: set[Combination] = set()
        self.replayed: set[Combination] = set()

    def plan(self) -> Plan:
        """The whole answer."""
        tiers = self.best_of_each_tier()
        fastest = roomiest = self.fastest()
        if fastest:
            fastest = roomiest = tiers[fastest.tier] = self.answers.with_sizes(fastest)
            least = self.roomiest(fastest)
            roomiest = self.answers.with_sizes(least) if least else fastest
        last = () if fastest else last_resorts(self)
        first = next((option for option in tiers.values() if not option.missing), None)
        start = first or min(tiers.values(), key=lambda option: option.missing)
        changes = switches(self, start)
        options = [*tiers.values(), *filter(None, [fastest, roomiest]), *last]
        return Plan(
            self.question,
            self.card,
            fastest and self.named(fastest),
            roomiest and self.named(roomiest),
            {tier: self.named(option) for tier, option in tiers.items()},
            self.named(start),
            changes,
            decision(self, start, changes),
            () if fastest else tuple(remedies(self, tiers, last)) or (NO_CARD,),
            self.recipes.excluded,
            self.answers.assumed(options),
            tuple(map(self.named, last)),
        )

    def named(self, option: Option) -> Option:
        """The option with the model as the user named it, and not as the config it stands for."""
        if not isinstance(self.question.model, str):
            return option
        recipe = option.recipe.but(model=self.question.model, task=option.recipe.task)
        return dataclasses.replace(option, recipe=recipe)

    # ------------------------------------------------------------------ one combination

    def ask(self, combination: Combination) -> None:
        """Find the largest micro-batch of a combination whose tensors fit, if any do."""
        least = self.recipes.least_bytes(combination) + self.answers.context
        self.lacks[combination] = max(0, least - self.answers.room)
        if self.lacks[combination]:
            return
        self.traced.add(combination)
        if has_runs_only(self.recipes.recipe(combination, 1)):
            self.run(combination)
            return
        batch = self._largest_batch(combination, least)
        if batch:
            self.options[combination] = self.answers.at_least(
                self.recipes.recipe(combination, batch)
            )

    def _largest_batch(self, combination: Combination, least: int) -> int:
        """The largest micro-batch whose tensors fit, or 0.

        One sequence, and all of a step at once, have traces of their own: they are asked last, the
        one only where it can fit. What it needs is more than `least` and its share of the rest.
        """

        def fits(batch: int) -> bool:
            needed = self.answers.tensors(self.recipes.recipe(combination, batch))
            if needed > self.answers.room:
                self.lacks[combination] = needed - self.answers.room
            return needed <= self.answers.room

        batches = self.recipes.batches
        between = batches[1:-1]
        low, high = 0, len(between)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(between[middle]) else (low, middle)
        if low == len(between) and len(batches) > 1 and fits(batches[-1]):
            self.lacks[combination] = 0
            return batches[-1]
        if low:
            return between[low - 1]
        if self.lacks[combination]:
            larger = self.answers.room + self.lacks[combination]  # the second smallest micro-batch
            needed = least + (larger - least) // batches[1]
            if needed > self.answers.room:
                self.lacks[combination] = needed - self.answers.room
                return 0
        return int(fits(1))

    def run(self, combination: Combination) -> Option | None:
        """Simulate a combination of which each size is a run of its own, with few sizes.

        After one sequence comes what fits if all but weights, gradients and states grows.
        """
        batches, room = self.recipes.batches, self.answers.room
        least = self.recipes.least_bytes(combination) + self.answers.context
        option = self.answers.simulated(self.recipes.recipe(combination, 1))
        self.lacks[combination] = option.missing
        if option.missing:
            return None
        each = option.needed - least
        batch = max(n for n in batches if n == 1 or least + n * each <= room)
        if batch > 1:
            larger = self.answers.simulated(self.recipes.recipe(combination, batch))
            option = option if larger.missing else larger
        self.lacks[combination] = each * (option.recipe.batch_size < batches[-1])
        self.options[combination] = option
        self.replayed.add(combination)
        return option

    def replay(self, combination: Combination) -> None:
        """Let the allocator confirm an option, with a smaller micro-batch where it does not fit."""
        recipe = self.options.pop(combination).recipe
        while True:
            option = self.answers.simulated(recipe)
            if not option.missing:
                self.options[combination] = option
                self.replayed.add(combination)
                return
            self.lacks[combination] = option.missing
            smaller = [n for n in self.recipes.batches if n < recipe.batch_size]
            if not smaller:
                return
            recipe = self.recipes.recipe(combination, smaller[-1])

    # ------------------------------------------------------------------ several combinations

    def may_help(self, combination: Combination, group: Sequence[Combination]) -> bool:
        """Whether a combination may be better than what is known of its group."""
        if combination in self.lacks:
            return False
        for plainer in group[: group.index(combination)]:
            all_at_once = (
                self.lacks.get(plainer) == 0 and plainer.precision == combination.precision
            )
            if all_at_once and plainer.checkpointing <= combination.checkpointing:
                return False
        kind = combination.checkpointing, combination.precision
        first = next(
            plainer for plainer in group if (plainer.checkpointing, plainer.precision) == kind
        )
        if combination is first:
            return True
        saved = self.recipes.least_bytes(first) - self.recipes.least_bytes(combination)
        return saved >= self.lacks.get(first, 0) > 0

    def best(self, candidates: Iterable[Combination]) -> Combination | None:
        """The best of the options, replayed; None where none fits."""
        fitting = [combination for combination in candidates if combination in self.options]
        while fitting:
            best = plainest(
                fitting, lambda one: self.answers.time(self.options[one].recipe) or float("inf")
            )
            if best in self.replayed:
                return best
            self.replay(best)
            fitting = [combination for combination in fitting if combination in self.options]
        return None

    def best_of(self, candidates: Sequence[Combination]) -> Option | None:
        """The best of a tier, replayed; None where nothing fits, with the loss in parts either."""
        for group in groups(candidates):
            best, asked = None, -1
            while len(self.lacks) > asked:  # what a replay has said may ask for more
                asked = len(self.lacks)
                for combination in group:
                    if self.may_help(combination, group):
                        self.ask(combination)
                best = self.best(group)
            if best:
                return self.options[best]
        return self.in_parts(candidates)

    def in_parts(self, candidates: Sequence[Combination]) -> Option | None:
        """The most sparing with the loss in parts, where logits are what is too much."""
        near = [
            lack
            for combination, lack in self.lacks.items()
            if combination in candidates and combination.checkpointing
        ]
        combination = self.recipes.in_parts(self.most_sparing(candidates))
        if combination is None or min(near, default=0) > self.recipes.bytes_of_logits:
            return None
        least = self.recipes.least_bytes(combination) + self.answers.context
        return None if least > self.answers.room else self.run(combination)

    def most_sparing(self, candidates: Sequence[Combination]) -> Combination:
        """What is likely to hold least; of those whose states page only where all do."""
        return self.recipes.most_sparing(
            [combination for combination in candidates if not is_paged(combination.optimizer)]
            or list(candidates)
        )

    # ------------------------------------------------------------------ parts of the answer

    def best_of_each_tier(self) -> dict[int, Option]:
        """The best of each tier that can be had at all, or what lacks little."""
        of_tier: dict[int, list[Combination]] = {}
        for combination in self.recipes.combinations:
            of_tier.setdefault(combination.tier, []).append(combination)
        best = {}
        for tier, candidates in sorted(of_tier.items()):
            option = self.best_of(candidates)
            if option:
                best[tier] = option
                self.tell(f"tier {tier} fits: {option}")
        for tier, candidates in sorted(of_tier.items()):
            if tier not in best:
                best[tier] = self.nearest(candidates)
        return dict(sorted(best.items()))

    def nearest(self, candidates: Sequence[Combination]) -> Option:
        """What is likely to lack least of what does not fit, with one sequence.

        Where its weights, gradients and states are too many, nobody needs to know more.
        """
        combination = self.most_sparing(candidates)
        recipe, answers = self.recipes.recipe(combination, 1), self.answers
        least = self.recipes.least_bytes(combination) + answers.context
        if least <= answers.room:
            return answers.simulated(recipe)
        margin, total = answers.total_memory - answers.room, answers.total_memory
        return Option(recipe, least, margin, total, None, at_least=True)

    def fastest(self) -> Option | None:
        """The best of all that fits of what was asked."""
        places = {combination: n for n, combination in enumerate(self.recipes.combinations)}
        order = sorted(self.options, key=lambda combination: places.get(combination, len(places)))
        best = self.best(order)
        return self.options[best] if best else None

    def best_of_way(self, way: str) -> Option | None:
        """The best of a way to train, or what lacks little; None where it is not possible."""
        candidates = [
            combination for combination in self.recipes.combinations if combination.way == way
        ]
        for tier in sorted({combination.tier for combination in candidates}):
            self.best_of([combination for combination in candidates if combination.tier == tier])
        in_parts = [combination for combination in self.options if combination.loss != "whole"]
        best = self.best(
            [combination for combination in (*candidates, *in_parts) if combination.way == way]
        )
        if best:
            return self.options[best]
        return self.nearest(candidates) if candidates else None

    def roomiest(self, fastest: Option) -> Option | None:
        """What leaves the most room, of the way with the smallest base; None where that is little
        more than the fastest leaves."""
        every = self.recipes.combinations
        way = max((combination.way for combination in every), key=list(WAYS).index)
        option = self.nearest([combination for combination in every if combination.way == way])
        enough = fastest.needed - SAME_ROOM * self.answers.total_memory
        return option if option.needed < enough else None

    # ------------------------------------------------------------------ what is being done

    def say(self, text: str) -> None:
        """What is being done."""
        if self.progress is not None:
            self.progress.set_description(text)

    def tell(self, text: str) -> None:
        """A part of the answer that is known already, on a terminal."""
        if self.progress is not None and not self.progress.disable and sys.stderr.isatty():
            self.progress.write(text, file=sys.stderr)


def _which_card(question: Question, cards: list[GPU], margin: float) -> Cards:
    """The best of each way on each card, simulated."""
    cards = sorted(cards, key=lambda card: card.total_memory or 0)
    cards = [card for card in cards if computes(card, question)] or cards[:1]
    bar = Progress(cards, delay=0)
    options: dict[str, dict[str, Option]] = {}
    smallest: dict[str, str | None] = dict.fromkeys(question.ways)
    assumed: dict[str, None] = {}
    for card in bar:
        search = Search(question, card, margin, bar)
        search.say(f"planning for {card.name}")
        options[card.name] = {}
        for way in question.ways:
            option = search.best_of_way(way)
            if option is None:
                continue
            if not option.missing and smallest[way] is None:
                smallest[way] = card.name
            options[card.name][way] = search.named(option)
        assumed |= dict.fromkeys(search.answers.assumed(options[card.name].values()))
    bar.close()
    return Cards(question, options, smallest, tuple(assumed))


def _with_rates(card: GPU) -> GPU:
    """The card; one that is only bytes is as quick as an A100, whose other rules it has."""
    if card.bandwidth is None:
        return dataclasses.replace(card, rates=LIKE.rates, bandwidth=LIKE.bandwidth)
    return card
