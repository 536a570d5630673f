"""Search for the recipe that trains a model on a GPU: traces propose, the allocator confirms.

A combination is a way, a precision, an optimizer, checkpointing or not, and a sharding. For each
combination that may be the best of its tier, the search finds the largest micro-batch whose tensors
fit. It bisects on the peak of the combination's trace (`memlab.predict.traces`), which takes
milliseconds per size. The best candidates are then replayed through the GPU's caching allocator. A
candidate that runs out of memory there gets a smaller micro-batch. The search ends when the best
candidate is a replayed one, so all bytes of an answer are those of `memlab.fits`. The exception is
ddp, whose ranks `memlab.predict.replicas` derives from one GPU's trace.

A combination is skipped if it cannot be better:

- its weights, gradients and states alone are too large;
- it adds checkpointing, although all sequences of a step fit at once without;
- it has smaller or sharded states, which save less than a larger micro-batch lacks.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
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

    Named = GPU | str | int  # a GPU, its name, or its bytes

SAME_ROOM = 0.02  # share of a GPU's memory; an option that saves less is not roomier


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
    """Plan how to train a model on a GPU, or which GPU to choose.

    gpu: a GPU as for `fits`. Several of them, or None for the list
        `memlab.planner.cards.LADDER`, ask for the smallest GPU for each way to train.
    model, seq_len, effective_batch, more: the fields of `memlab.planner.result.Question`. Sequences
        are `seq_len` tokens long; `effective_batch` of them make an optimizer step.
    margin: as in `fits`.

    `fits` and its margin decide what fits, and estimated seconds decide what is fastest. A GPU
    given in bytes is taken to be as fast as an A100. With several ranks, all on GPUs of one kind,
    the plan considers `ddp`, `zero2` and `zero3`.

    If no recipe of a tier fits with the model's own loss, the most sparing one is tried with the
    loss in parts. Its value is the same.

    Raises ValueError in one line for an invalid question.
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
    # `as search.progress` hands the bar to the search, which writes on it what is being done.
    with gc_frozen(), Progress(desc="planning", delay=0, bar_format=BAR) as search.progress:
        return search.plan()


BAR = "{desc} [{elapsed}]"  # no share done: how many recipes the search will ask for is unknown


class Search:
    """The search for one question on one GPU.

    answers: bytes and seconds of single recipes, cached.
    recipes: the combinations to search, and the recipe of each at any size.
    options: combination -> the option with the largest micro-batch that fits.
    lacks: every combination that was asked -> bytes that its next larger micro-batch lacks; 0 if
        all sequences of a step fit at once.
    traced: the asked combinations whose weights, gradients and states alone fit.
    replayed: the combinations whose option the allocator has confirmed.
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
        """Answer the question."""
        tiers = self.best_of_each_tier()
        fastest = roomiest = self.fastest()
        if fastest:
            # The fastest option replaces the best of its tier: now it knows its largest sizes.
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
            self.answers.room,
            (*self.answers.assumed(options), *self._without_tf32(options)),
            tuple(map(self.named, last)),
        )

    def _without_tf32(self, options: Iterable[Option]) -> Iterator[str]:
        """What is assumed of products in fp32, on GPUs whose tensor cores could shorten them."""
        rates = self.card.rates or {}
        times = rates.get("tf32", 0) / rates.get("float32", 1)
        timed = (option.recipe for option in options if option.seconds)
        if times > 1 and any(recipe.precision == "fp32" for recipe in timed):
            yield (
                "fp32 multiplies without TF32, as PyTorch does by default; "
                'torch.set_float32_matmul_precision("high") makes products up to '
                f"{times:.2g} times as fast"
            )

    def named(self, option: Option) -> Option:
        """The option with the model as the user named it, in place of the config read for it."""
        if not isinstance(self.question.model, str):
            return option
        recipe = option.recipe.but(model=self.question.model, task=option.recipe.task)
        return dataclasses.replace(option, recipe=recipe)

    # ------------------------------------------------------------------ one combination

    def ask(self, combination: Combination) -> None:
        """Find the largest micro-batch of a combination whose tensors fit, if any does.

        Sets the combination's entry in `lacks`, and in `traced` and `options` where they apply.
        """
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

        On one GPU, all sizes in between share one trace. One sequence, and all sequences of a step
        at once, have traces of their own (`memlab.predict.structure.TraceDomain`). So these two are
        asked last. least: bytes without activations.
        """

        def fits(batch: int) -> bool:
            needed = self.answers.tensors(self.recipes.recipe(combination, batch))
            if needed > self.answers.room:
                self.lacks[combination] = needed - self.answers.room
            return needed <= self.answers.room

        batches = self.recipes.batches
        between = batches[1:-1]
        low, high = 0, len(between)
        # Bisect: in the end, the first `low` sizes of `between` fit, and the next one does not.
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(between[middle]) else (low, middle)
        if low == len(between) and len(batches) > 1 and fits(batches[-1]):
            self.lacks[combination] = 0
            return batches[-1]
        if low:
            return between[low - 1]
        if self.lacks[combination]:
            # Bytes grow with the batch on top of a constant part that is at least `least`. So one
            # sequence needs at least its share of what the second smallest micro-batch adds. Its
            # own trace is recorded only if that share fits.
            larger = self.answers.room + self.lacks[combination]  # of the second smallest
            needed = least + (larger - least) // batches[1]
            if needed > self.answers.room:
                self.lacks[combination] = needed - self.answers.room
                return 0
        return int(fits(1))

    def run(self, combination: Combination) -> Option | None:
        """Simulate a combination that needs a run for each size, at one or two sizes.

        The first size is one sequence. The second is the largest micro-batch that fits if all bytes
        but those of weights, gradients and states grow with the batch.
        """
        batches, room = self.recipes.batches, self.answers.room
        least = self.recipes.least_bytes(combination) + self.answers.context
        option = self.answers.simulated(self.recipes.recipe(combination, 1))
        self.lacks[combination] = option.missing
        if option.missing:
            return None
        each = option.needed - least  # bytes that one more sequence may add, at most
        batch = max(n for n in batches if n == 1 or least + n * each <= room)
        if batch > 1:
            larger = self.answers.simulated(self.recipes.recipe(combination, batch))
            option = option if larger.missing else larger
        # An estimate: the next larger micro-batch was not simulated.
        self.lacks[combination] = each * (option.recipe.batch_size < batches[-1])
        self.options[combination] = option
        self.replayed.add(combination)
        return option

    def replay(self, combination: Combination) -> None:
        """Confirm an option by the allocator, with smaller micro-batches until one fits.

        If none does, the combination has no option any more.
        """
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
        """Whether a combination may beat those of its group that were asked already."""
        if combination in self.lacks:  # asked already
            return False
        # If a plainer combination takes all sequences of a step at once, less memory buys nothing.
        for plainer in group[: group.index(combination)]:
            all_at_once = (
                self.lacks.get(plainer) == 0 and plainer.precision == combination.precision
            )
            if all_at_once and plainer.checkpointing <= combination.checkpointing:
                return False
        # Combinations of one kind differ in their states and sharding. A later one is worth a trace
        # only if it saves at least what the first one's next larger micro-batch lacks.
        kind = combination.checkpointing, combination.precision
        first = next(
            plainer for plainer in group if (plainer.checkpointing, plainer.precision) == kind
        )
        if combination is first:
            return True
        saved = self.recipes.least_bytes(first) - self.recipes.least_bytes(combination)
        return saved >= self.lacks.get(first, 0) > 0

    def best(self, candidates: Iterable[Combination]) -> Combination | None:
        """The best of the candidates, confirmed by a replay; None if none of them fits."""
        fitting = [combination for combination in candidates if combination in self.options]
        while fitting:
            # Without an estimate of its time, a recipe is the last choice of its group.
            best = plainest(
                fitting, lambda one: self.answers.time(self.options[one].recipe) or float("inf")
            )
            if best in self.replayed:
                return best
            self.replay(best)  # which may shrink the micro-batch, or drop the option: choose again
            fitting = [combination for combination in fitting if combination in self.options]
        return None

    def best_of(self, candidates: Sequence[Combination]) -> Option | None:
        """The best option of a tier, replayed; None if nothing fits, even with the loss in parts.

        Groups are asked in the order of `memlab.planner.choice.groups`; the first that fits wins.
        """
        for group in groups(candidates):
            best, asked = None, -1
            # A replay may raise what a combination lacks, and so make others worth a trace: repeat
            # until no new combination is asked.
            while len(self.lacks) > asked:
                asked = len(self.lacks)
                for combination in group:
                    if self.may_help(combination, group):
                        self.ask(combination)
                best = self.best(group)
            if best:
                return self.options[best]
        return self.in_parts(candidates)

    def in_parts(self, candidates: Sequence[Combination]) -> Option | None:
        """The most sparing recipe of a group with the loss in parts; None if that cannot fit.

        Groups are asked in the order of `memlab.planner.choice.groups`. A group is tried only if
        one of its combinations with checkpointing lacks no more than the loss in parts can save.
        """
        for group in groups(candidates):
            sparing = [combination for combination in group if combination.checkpointing]
            near = [self.lacks[combination] for combination in sparing if combination in self.lacks]
            # If nothing like it was asked about, a group is not worth a run.
            lack = min(near) if near else math.inf if sparing else 0
            combination = self.recipes.in_parts(self.most_sparing(group))
            if combination is None or lack > self.recipes.bytes_of_logits:
                continue
            least = self.recipes.least_bytes(combination) + self.answers.context
            option = None if least > self.answers.room else self.run(combination)
            if option:
                return option
        return None

    def most_sparing(self, candidates: Sequence[Combination]) -> Combination:
        """The combination that probably holds the fewest bytes; paged only if all of them are."""
        return self.recipes.most_sparing(
            [combination for combination in candidates if not is_paged(combination.optimizer)]
            or list(candidates)
        )

    # ------------------------------------------------------------------ parts of the answer

    def best_of_each_tier(self) -> dict[int, Option]:
        """Tier -> its best option, or the one that probably lacks least if none fits."""
        of_tier: dict[int, list[Combination]] = {}
        for combination in self.recipes.combinations:
            of_tier.setdefault(combination.tier, []).append(combination)
        best = {}
        for tier, candidates in sorted(of_tier.items()):
            option = self.best_of(candidates)
            if option:
                best[tier] = option
                self.tell(f"tier {tier} fits: {option}")
        # Only now, after the terminal has shown all that fits: what follows is for the table.
        for tier, candidates in sorted(of_tier.items()):
            if tier not in best:
                best[tier] = self.nearest(candidates)
        return dict(sorted(best.items()))

    def nearest(self, candidates: Sequence[Combination]) -> Option:
        """The option that probably needs the fewest bytes, with one sequence.

        It is not simulated if its weights, gradients and states alone do not fit (`at_least`).
        """
        combination = self.most_sparing(candidates)
        recipe, answers = self.recipes.recipe(combination, 1), self.answers
        least = self.recipes.least_bytes(combination) + answers.context
        if least <= answers.room:
            return answers.simulated(recipe)
        margin, total = answers.total_memory - answers.room, answers.total_memory
        return Option(recipe, least, margin, total, None, at_least=True)

    def fastest(self) -> Option | None:
        """The best of all options so far, or None."""
        # In the order of the question, with those that have the loss in parts at the end.
        places = {combination: n for n, combination in enumerate(self.recipes.combinations)}
        order = sorted(self.options, key=lambda combination: places.get(combination, len(places)))
        best = self.best(order)
        return self.options[best] if best else None

    def best_of_way(self, way: str) -> Option | None:
        """The best option of a way to train, or the one that probably lacks least.

        None if the model cannot be trained that way.
        """
        candidates = [
            combination for combination in self.recipes.combinations if combination.way == way
        ]
        for tier in sorted({combination.tier for combination in candidates}):
            # For its effect on `self.options`, which gains combinations with the loss in parts.
            self.best_of([combination for combination in candidates if combination.tier == tier])
        in_parts = [combination for combination in self.options if combination.loss != "whole"]
        best = self.best(
            [combination for combination in (*candidates, *in_parts) if combination.way == way]
        )
        if best:
            return self.options[best]
        return self.nearest(candidates) if candidates else None

    def roomiest(self, fastest: Option) -> Option | None:
        """The option that leaves the most room; None if `fastest` leaves nearly as much.

        It is the most sparing recipe of the way with the smallest base.
        """
        every = self.recipes.combinations
        # WAYS is ordered from the largest base to the smallest: full, LoRA, QLoRA.
        way = max((combination.way for combination in every), key=list(WAYS).index)
        option = self.nearest([combination for combination in every if combination.way == way])
        enough = fastest.needed - SAME_ROOM * self.answers.total_memory
        return option if option.needed < enough else None

    # ------------------------------------------------------------------ progress

    def say(self, text: str) -> None:
        """Show on the progress bar what is being done."""
        if self.progress is not None:
            self.progress.set_description(text)

    def tell(self, text: str) -> None:
        """Print a part of the answer above the progress bar, on a terminal only."""
        if self.progress is not None and not self.progress.disable and sys.stderr.isatty():
            self.progress.write(text, file=sys.stderr)


def _which_card(question: Question, cards: list[GPU], margin: float) -> Cards:
    """The best option of each way on each GPU, simulated, from the smallest GPU up."""
    cards = sorted(cards, key=lambda card: card.total_memory or 0)
    # If no GPU has the number formats, the search on one of them raises the error that says so.
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
    """The GPU; one given in bytes gets the rates of an A100, whose other rules it has already."""
    if card.bandwidth is None:
        of_like = {name: getattr(LIKE, name) for name in ("rates", "bandwidth", "cache")}
        return dataclasses.replace(card, **of_like)
    return card
