"""What the formula says of every recipe that a question allows on a card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import isqrt

from memlab import models
from memlab.card.links import link_rate
from memlab.footprint import Footprint
from memlab.gpus import GPU, GPUS
from memlab.planner.choice import plainest
from memlab.planner.result import Option, Question, described, is_paged, way_of
from memlab.planner.space import HALF, NF4, Combination, attention_of, combinations, refusal
from memlab.predict.fit import room
from memlab.predict.formula import formula
from memlab.predict.simulate import simulate
from memlab.spec.recipe import AUTOCAST, Recipe

CLIPPING = 1.0  # the Trainer's own
SAME_ROOM = 0.02  # of a card; within so much of the most room a recipe that is simulated is told
SHORT = 0.03  # of what is allocated; benchmarks/formula.py finds the formula that far below
LIKE = GPUS["A100-80GB"]  # how quick a card is that is only bytes


class Estimates:
    """The recipes of one question, and the formula's footprint of each on a card.

    combinations: what is searched, the plainest first; excluded: what is not, and why. surplus:
    what a simulation was found to need beyond the formula, by way and sharding. assumptions: what
    the footprints assume, in their order. say: told what is being done.
    """

    def __init__(self, question: Question, card: GPU, margin: float, say: Callable[[str], None]):
        self.question, self.card, self.say = question, card, say
        self.room = room(card, margin)
        link_rate(GPUS.get(card.name, LIKE), question.link)  # or an error
        named = isinstance(question.model, str) and question.model in models.MODELS
        self.model = question.model if named else models.config(question.model)
        self.effective = question.effective_batch // question.ranks  # of each rank
        self.attention = "eager"
        for way in question.ways:
            first = Combination(way, "fp32", "adamw_torch_fused")
            self.recipe(first, 1, ranks=1, model=question.model)  # or an error
        self.attention = attention_of(self.model, question.task)
        refused = question.ways != ("full",) and refusal(self.model, question)
        small = {n for n in range(1, isqrt(self.effective) + 1) if self.effective % n == 0}
        self.batches = sorted(small | {self.effective // n for n in small})
        self.combinations, self.excluded = combinations(question, card, refused or "")
        self.surplus: dict[tuple[str, str], int] = {}
        self.footprints: dict[tuple, Footprint] = {}
        self.assumptions: dict[str, None] = {}

    def recipe(self, one: Combination, batch: int, **changes) -> Recipe:
        """A combination with a micro-batch."""
        asked = self.question
        values = {
            "model": self.model,
            "task": asked.task,
            "batch_size": batch,
            "accumulation": max(1, self.effective // batch),
            "seq_len": asked.seq_len,
            "precision": one.precision,
            "optimizer": one.optimizer,
            "checkpointing": one.checkpointing,
            "attention": self.attention,
            "max_grad_norm": CLIPPING,
            "ranks": asked.ranks,
            "sharding": one.sharding,
            "expandable_segments": asked.expandable_segments,
        }
        if one.way != "full":
            values["lora_rank"] = asked.lora_rank
            values |= HALF if one.precision in AUTOCAST else {}
        if one.way == "qlora":
            values |= NF4
        return Recipe(**values | changes)

    def footprint(self, recipe: Recipe) -> Footprint:
        """What the formula says, or a simulation where there is no formula."""
        key = (trace_key(recipe), recipe.batch_size, recipe.accumulation, recipe.seq_len)
        if key not in self.footprints:
            self.footprints[key] = _quick(recipe, self.card, self.question.link, self.say)
            self.assumptions |= dict.fromkeys(self.footprints[key].assumptions)
        return self.footprints[key]

    def option(self, recipe: Recipe) -> Option:
        """A recipe by the formula: the bytes of its blocks, without what their order adds."""
        needed = self.footprint(recipe).peak_allocated + self.card.context
        total = self.card.total_memory
        return Option(recipe, needed, total - self.room, total, self.seconds(recipe), False)

    def seconds(self, recipe: Recipe) -> float | None:
        """The estimated seconds of a step; None where states move, or the host does the step."""
        if is_paged(recipe.optimizer) or recipe.optimizer_offload != "none":
            return None
        time = self.footprint(recipe).step_time
        return time and time.expected

    def time(self, option: Option) -> float:
        """What options are sorted by: the estimated seconds of a step, as if no state moved."""
        time = self.footprint(option.recipe).step_time
        return time.expected if time else float("inf")

    def expected(self, recipe: Recipe) -> Option:
        """As `option`, with what a simulation of the same way was found to need beyond that."""
        option = self.option(recipe)
        more = self.surplus.get((option.way, recipe.sharding), 0)
        return dataclasses.replace(option, needed=option.needed + more)

    def upper_bound(self, recipe: Recipe) -> Option:
        """A recipe as if no block were used twice, and the formula as short as it ever was."""
        option, most = self.expected(recipe), self.footprint(recipe).reserved_range
        most = most[1] + self.card.context if most else 0
        return dataclasses.replace(option, needed=max(int(option.needed * (1 + SHORT)), most))

    def largest(self, one: Combination, judge=None) -> Option:
        """The combination with the largest micro-batch that fits by the formula, or else with 1.

        judge: `upper_bound`, or by itself `expected`.
        """
        judge = judge or self.expected
        found = judge(self.recipe(one, 1))
        low, high = 0, len(self.batches)
        while high - low > 1 and not found.missing:
            middle = (low + high) // 2
            option = judge(self.recipe(one, self.batches[middle]))
            if option.missing:
                high = middle
            else:
                low, found = middle, option
        return found

    def fastest_of(self, options: dict[Combination, Option]) -> Combination | None:
        """The plainest of those that are about as fast as the fastest; None of none."""
        return plainest(options, self.time)

    def least(self, fastest: Option) -> Recipe:
        """What leaves the most room by the formula, of the like what trains as the fastest does."""
        recipes = [self.recipe(one, 1) for one in self.combinations]
        needed = [self.option(recipe).needed for recipe in recipes]
        most = min(needed) + SAME_ROOM * self.card.total_memory
        alike = [it for it, there in zip(recipes, needed, strict=True) if there <= most]
        same = trace_key(fastest.recipe)
        return next((it for it in alike if trace_key(it) == same), alike[0])

    def plain(self) -> tuple[Option, Footprint]:
        """The plain recipe of the first way."""
        recipe = self.recipe(self.combinations[0], 1)
        return self.option(recipe), self.footprint(recipe)

    def note_surplus(self, option: Option) -> None:
        """Remember what an option that is simulated needs beyond the formula."""
        more = option.needed - self.option(option.recipe).needed
        self.surplus[option.way, option.recipe.sharding] = max(0, more)


def _quick(recipe: Recipe, card: GPU, link: str | None, say) -> Footprint:
    """The footprint by the formula; where there is none, simulated."""
    like = card if card.name in GPUS else dataclasses.replace(card, name=LIKE.name)  # its links
    say(f"asking the formula for {described(recipe)}")
    try:
        return formula(recipe, like, link)
    except ValueError:
        say(f"simulating {described(recipe)} on {card.name}")
        return simulate(recipe, like.without_limit(), link)


def trace_key(recipe: Recipe) -> tuple:
    """What a trace depends on, apart from sizes."""
    return (
        way_of(recipe),
        recipe.precision,
        recipe.optimizer,
        recipe.checkpointing,
        recipe.sharding,
    )
