"""Which recipe trains a model on a card: the formula looks everywhere, a simulation confirms.

Every combination of way, precision, optimizer and checkpointing is asked of `memlab.formula` for
the largest micro-batch that fits. The best are then simulated, one trace each
(`memlab.predict.traces`), which corrects what the formula said, of the like of it too, until the
best one is a simulated one. The other ways are answered for by the formula where they fit even if
no block of memory is used twice, and else simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from memlab.gpus import GPU, GPUS, find_gpu
from memlab.planner.advice import decision, switches
from memlab.planner.cards import LADDER, Cards
from memlab.planner.choice import fitting
from memlab.planner.estimates import LIKE, Estimates, trace_key
from memlab.planner.result import WAYS, WORST, Option, Plan, Question, described
from memlab.planner.rungs import rungs
from memlab.planner.space import Combination, computes
from memlab.predict.fit import MARGIN, largest_size, limited, verdict, why_no_larger
from memlab.predict.progress import Progress
from memlab.predict.run import gc_frozen
from memlab.predict.simulate import sized_log
from memlab.spec.logits import unlike_product
from memlab.spec.recipe import Recipe
from memlab.trace.log import Log

if TYPE_CHECKING:
    from memlab.models import Model

    Named = GPU | str | int  # a card

TRACES = 4  # simulations at most until the fastest is one that is simulated
NEAR = 0.05  # lacking so much of a card by the formula, it may yet fit
RANKS = (2, 4, 8, 16, 32, 64)  # cards that are proposed where one does not do


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

    What fits is decided by the margin of `fits`; which is fastest by estimated seconds. The formula
    knows no order of events, so what it says of bytes is confirmed by simulations where a figure
    says "simulated": the fastest recipe, the one with the most room, their largest micro-batch and
    their longest sequence. A card given in bytes is taken as quick as an A100.

    With several ranks, on cards of one kind, `ddp`, `zero2` and `zero3` are looked at. What a rank
    holds by the formula is an estimate (`memlab.predict.formula_ranks`), so the best of each
    way is simulated. Seconds are those of the formula everywhere.

    Where the formula's traces are of other releases of PyTorch and other libraries than those
    installed, the answer says so. Raises ValueError in one line for what cannot be asked.
    """
    margin = more.pop("margin", MARGIN)
    question = Question(model, seq_len, effective_batch, **more)
    named: Sequence[Named] = LADDER
    if isinstance(gpu, Sequence) and not isinstance(gpu, str):
        named = gpu
    elif gpu is not None:
        named = [gpu]
    cards = [_with_rates(limited(one, margin)) for one in named]
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
    """The search for one question on one card: estimates, and simulations where they decide."""

    def __init__(
        self, question: Question, card: GPU, margin: float, progress: Progress | None = None
    ) -> None:
        self.question, self.card, self.margin, self.progress = question, card, margin, progress
        self.estimates = Estimates(question, card, margin, self.say)
        self.sizes: dict[tuple[object, ...], tuple[int, int | None]] = {}
        assert card.total_memory is not None and card.context is not None  # it has a limit
        self.total_memory, self.context = card.total_memory, card.context

    def plan(self) -> Plan:
        """The whole answer."""
        options = {one: self.estimates.largest(one) for one in self.estimates.combinations}
        options, fastest, roomiest = self.fastest_and_smallest(options)
        tiers = self.best_of_each_tier(options, fastest)
        sparing = () if fastest else self.rungs()
        start, footprint = self.estimates.plain()
        changes = switches(self.estimates, start)
        return Plan(
            self.question,
            self.card,
            fastest and self.named(fastest),
            roomiest and self.named(roomiest),
            {tier: self.named(option) for tier, option in tiers.items()},
            self.named(start),
            changes,
            decision(start, footprint, changes, self.estimates.room),
            () if fastest else tuple(self.remedies(options, sparing)),
            self.estimates.excluded,
            tuple(self.estimates.assumptions),
            tuple(map(self.named, sparing)),
        )

    def named(self, option: Option) -> Option:
        """The option with the model as the reader named it, and not as the config it stands for."""
        if not isinstance(self.question.model, str):
            return option
        recipe = option.recipe.but(model=self.question.model, task=option.recipe.task)
        return dataclasses.replace(option, recipe=recipe)

    # ------------------------------------------------------------------ simulations

    def simulate_until_stable(
        self, options: dict[Combination, Option]
    ) -> dict[Combination, Option]:
        """The options; the best of those that fit is a simulated one."""
        options = dict(options)
        for _ in range(TRACES):
            best = self.estimates.fastest_of(fitting(options))
            if best is None:  # it may be the formula that lacks some bytes
                best = min(options, key=lambda one: options[one].missing)
                if options[best].missing > NEAR * self.total_memory:
                    break
            if options[best].simulated:
                break
            options[best] = self.confirmed(options[best])
            options = {
                one: it if it.simulated else self.estimates.largest(one)
                for one, it in options.items()
            }
        return options

    def told(self, options: dict[Combination, Option]) -> Combination:
        """The best of what fits in a simulation; else the one that lacks least."""
        while True:
            best = self.estimates.fastest_of(
                {one: it for one, it in fitting(options).items() if it.simulated}
            )
            least = min(options, key=lambda one: (options[one].missing, options[one].needed))
            if best or options[least].missing:
                return best or least
            options[least] = self.confirmed(options[least])

    def best_of_method(self, options: dict[Combination, Option]) -> Option:
        """The best of a way or a tier, simulated only where it may be better than what surely fits.

        What loading a quantized base leaves behind is known from a simulation only.
        """
        said = self.estimates
        loaded = ("qlora", "ddp") in said.surplus or all(one.way != "qlora" for one in options)
        if self.question.ranks == 1 and loaded:
            surely = fitting({one: said.largest(one, said.upper_bound) for one in options})
            best, hoped = said.fastest_of(surely), said.fastest_of(fitting(options))
            if (
                best
                and hoped
                and said.fastest_of({best: surely[best]} | {hoped: options[hoped]}) == best
            ):
                return surely[best]
        options = self.simulate_until_stable(options)
        return options[self.told(options)]

    def confirmed(self, option: Option) -> Option:
        """The option as a simulation has it, with the largest micro-batch that it allows, or 1."""
        recipe, effective = option.recipe, self.estimates.effective
        while True:
            largest = self.size(recipe, "batch_size")[0]
            if recipe.accumulation == 1 and largest < effective > 1:
                # Gradients that wait for the next micro-batch are another training.
                recipe = self._cut(recipe, self.estimates.batches[-2])
                continue
            allowed = [n for n in self.estimates.batches if n <= largest and n < effective]
            if recipe.accumulation > 1:
                recipe = self._cut(recipe, max(allowed, default=1))
            return self.judged(recipe)

    def _cut(self, recipe: Recipe, batch: int) -> Recipe:
        return recipe.but(batch_size=batch, accumulation=self.estimates.effective // batch)

    def judged(self, recipe: Recipe) -> Option:
        """A recipe as a simulation has it; what it needs beyond the formula is remembered."""
        option = self.simulated(recipe)
        self.estimates.note_surplus(option)
        return option

    def simulated(self, recipe: Recipe) -> Option:
        """A recipe as a simulation has it."""
        log = self.log(recipe)
        self.estimates.assumptions |= dict.fromkeys(log.assumptions)
        said = verdict(recipe, log, self.card, self.margin)
        total, seconds = self.total_memory, self.estimates.seconds(recipe)
        return Option(recipe, said.needed, said.margin, total, seconds, True)

    def size(self, recipe: Recipe, field: str) -> tuple[int, int | None]:
        """As `largest_size`."""
        other = recipe.seq_len if field == "batch_size" else recipe.batch_size
        key = trace_key(recipe), recipe.accumulation > 1, field, other
        if key not in self.sizes:
            self.say(f"simulating {described(recipe)} on {self.card.name}")
            self.sizes[key] = largest_size(recipe, self.card, field, self.margin)
        return self.sizes[key]

    def log(self, recipe: Recipe) -> Log:
        """What a recipe does to memory."""
        self.say(f"simulating {described(recipe)} on {self.card.name}")
        return sized_log(recipe, self.card)

    def say(self, text: str) -> None:
        """What is being done."""
        if self.progress is not None:
            self.progress.set_description(text)

    # ------------------------------------------------------------------ parts of the answer

    def fastest_and_smallest(
        self, options: dict[Combination, Option]
    ) -> tuple[dict[Combination, Option], Option | None, Option | None]:
        """The options, the best one simulated; that one and what leaves most room, if any fits."""
        options, fastest = self.fastest(options)
        if fastest is None:
            return options, None, None
        roomiest = self.with_sizes(self.judged(self.estimates.least(fastest)))
        return options, fastest, min(roomiest, fastest, key=lambda option: option.needed)

    def fastest(
        self, options: dict[Combination, Option]
    ) -> tuple[dict[Combination, Option], Option | None]:
        """The options, the best one simulated, and that one with its sizes if it fits."""
        options = self.simulate_until_stable(options)
        best = options[self.told(options)]
        return options, None if best.missing else self.with_sizes(best)

    def with_sizes(self, option: Option) -> Option:
        """The option with its largest micro-batch and its longest sequence."""
        recipe = option.recipe
        batch, _ = self.size(recipe, "batch_size")
        length, following = self.size(recipe, "seq_len")
        return dataclasses.replace(
            option,
            largest_batch=batch,
            longest=length,
            longest_ends="" if following else why_no_larger(recipe, "seq_len"),
        )

    def best_of_each_tier(
        self, options: dict[Combination, Option], fastest: Option | None
    ) -> dict[int, Option]:
        """The best of each tier that can be had at all."""
        best = {}
        for tier in sorted({one.tier for one in options}):
            of_tier = {one: it for one, it in options.items() if one.tier == tier}
            if fastest and fastest.tier == tier:
                best[tier] = fastest
            elif any(it.simulated and not it.missing for it in of_tier.values()):
                best[tier] = of_tier[self.told(of_tier)]
            else:
                best[tier] = self.best_of_method(of_tier)
        return best

    def rungs(self) -> tuple[Option, ...]:
        """What fits, simulated, of the ways to train every weight before a larger card."""
        found = []
        for one, changes in rungs(self.question, self.card):
            recipe = self.estimates.recipe(one, self.estimates.effective, **changes)
            if recipe.task == "causal-lm" and not unlike_product(recipe.model):
                recipe = recipe.but(loss="chunked")
            found.append(self.simulated(recipe))
        return tuple(option for option in found if not option.missing)

    def remedies(
        self, options: dict[Combination, Option], sparing: tuple[Option, ...]
    ) -> list[str]:
        """What would fit where nothing does: another way, a shorter sequence, a larger card."""
        found = [
            f"tier {option.tier}, {option}{'; it may train worse' * (option.tier == WORST)}"
            for option in sparing
        ]
        for way in WAYS:
            if way not in self.question.ways:
                option = self.other(self.card, ways=(way,))
                found += [f"{option}"] if option else []
        simulated = [option for option in options.values() if option.simulated]
        nearest = min(simulated or options.values(), key=lambda option: option.missing).recipe
        length, _ = self.size(nearest, "seq_len")
        if length:
            found.append(f"sequences of {length:,} tokens, with {described(nearest)}")
        for ranks in RANKS:
            if ranks > self.question.ranks and self.question.effective_batch % ranks == 0:
                option = self.other(self.card, ranks=ranks)
                if option:
                    found.append(f"{ranks} x {self.card.name}, with {option}")
                    break
        for card in map(find_gpu, LADDER):
            if (card.total_memory or 0) > self.total_memory and computes(card, self.question):
                option = self.other(card)
                if option:
                    found.append(f"{card.name}, with {option}")
                    break
        return found or [f"none of {', '.join(LADDER)}: see the book's chapter 17-parallel"]

    def other(self, card: GPU, **changes: Any) -> Option | None:
        """The best of what fits a card when the question is changed; None where nothing does."""
        question = dataclasses.replace(self.question, **changes)
        try:
            search = Search(question, card, self.margin, self.progress)
        except ValueError:  # no adapters for this model, or no such way with ranks
            return None
        search.estimates.surplus |= self.estimates.surplus
        return search.certain_fit()

    def certain_fit(self) -> Option | None:
        """The best option that fits for sure by the formula, and of ranks by a simulation."""
        if self.question.ranks == 1:
            options = {
                one: self.estimates.largest(one, self.estimates.upper_bound)
                for one in self.estimates.combinations
            }
            certain = self.estimates.fastest_of(fitting(options))
            return options[certain] if certain else None
        options = self.simulate_until_stable(
            {one: self.estimates.largest(one) for one in self.estimates.combinations}
        )
        best = options[self.told(options)]
        return None if best.missing else best


def _which_card(question: Question, cards: list[GPU], margin: float) -> Cards:
    """The smallest card of each way, simulated; the others by the formula."""
    cards = sorted(cards, key=lambda card: card.total_memory or 0)
    cards = [card for card in cards if computes(card, question)] or cards[:1]
    bar = Progress(cards, delay=0)
    options: dict[str, dict[str, Option]] = {}
    smallest: dict[str, str | None] = dict.fromkeys(question.ways)
    assumed: dict[str, None] = {}
    for card in bar:
        search = Search(question, card, margin, bar)
        search.say(f"planning for {card.name}")
        every = {one: search.estimates.largest(one) for one in search.estimates.combinations}
        options[card.name] = {}
        for way in {one.way: None for one in every}:
            of_way = {one: option for one, option in every.items() if one.way == way}
            if smallest[way] is None:
                of_way = search.simulate_until_stable(of_way)
                best = of_way[search.told(of_way)]
                smallest[way] = None if best.missing else card.name
            else:
                best = search.best_of_method(of_way)
            options[card.name][way] = search.named(best)
        assumed |= search.estimates.assumptions
    bar.close()
    return Cards(question, options, smallest, tuple(assumed))


def _with_rates(card: GPU) -> GPU:
    """The card; one that is only bytes is as quick as an A100, whose other rules it has."""
    if card.bandwidth is None:
        return dataclasses.replace(card, rates=LIKE.rates, bandwidth=LIKE.bandwidth)
    return card
