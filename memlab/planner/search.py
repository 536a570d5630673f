"""Which recipe trains a model on a card: the closed form looks everywhere, a simulation confirms.

Every combination of way, precision, optimizer and checkpointing is asked of `memlab.formula` for
the largest micro-batch that fits. The best are then simulated, one trace each
(`memlab.predict.traces`), which corrects what the formula said, of the like of it too, until the
best one is a simulated one. The other ways are answered for by the formula where they fit even if
no block of memory is used twice, and else simulated.
"""

from __future__ import annotations

import dataclasses
import warnings

from tqdm.auto import tqdm

from memlab import models
from memlab.card.links import link_rate
from memlab.footprint import Category, Footprint
from memlab.gpus import GPU, GPUS
from memlab.planner.result import (
    PAGED_OUT,
    STATES,
    WAYS,
    Cards,
    Option,
    Plan,
    Question,
    Switch,
    described,
    is_paged,
    way_of,
)
from memlab.planner.space import NF4, Combination, attention_of, combinations, computes, refusal
from memlab.predict.closed_form import formula
from memlab.predict.coefficients import derive
from memlab.predict.fit import MARGIN, largest_size, limited, room, verdict, why_no_larger
from memlab.predict.run import gc_frozen
from memlab.predict.simulate import simulate, sized_log
from memlab.spec.recipe import Recipe
from memlab.trace.log import Log
from memlab.units import gib
from memlab.workloads.quantized import assumed

CLIPPING = 1.0  # the Trainer's own
TRACES = 4  # simulations at most until the fastest is one that is simulated
ALIKE = 0.05  # seconds are a rough figure: within so much of the least, the plainer recipe is told
SAME_ROOM = 0.02  # of a card; within so much of the most room a recipe that is simulated is told
SHORT = 0.03  # of what is allocated; benchmarks/formula.py finds the formula that far below
NEAR = 0.05  # lacking so much of a card by the formula, it may yet fit
LIKE = GPUS["A100-80GB"]  # how quick a card is that is only bytes
RANKS = (2, 4, 8, 16, 32, 64)  # cards that are proposed where one does not do


def plan(model, gpu=None, seq_len: int = 512, effective_batch: int = 16, **more) -> Plan | Cards:
    """How to train a model on a card, or which card to take.

    gpu: a card as for `fits`; or several, or None for all of `memlab.gpus.GPUS`, which asks for the
    smallest card of each way. model, seq_len (tokens), effective_batch (sequences of an optimizer
    step) and more: the fields of `memlab.planner.result.Question`; margin: as in `fits`.

    What fits is decided by the margin of `fits`; which is fastest by estimated seconds. The formula
    knows no order of events, so what it says of bytes is confirmed by simulations where a figure
    says "simulated": the fastest recipe, the one with the most room, their largest micro-batch and
    their longest sequence. A card given in bytes is taken as quick as an A100.

    With several ranks, on cards of one kind, `ddp`, `zero2` and `zero3` are looked at. What a rank
    holds by the formula is an estimate (`memlab.predict.closed_form_ranks`), so the best of each
    way is simulated. Seconds are those of the formula everywhere.

    Where the formula's coefficients are of other releases of PyTorch and other libraries than those
    installed, a warning says so. Raises ValueError in one line for what cannot be asked.
    """
    margin = more.pop("margin", MARGIN)
    question = Question(model, seq_len, effective_batch, **more)
    several = gpu is None or isinstance(gpu, (list, tuple))
    named = (list(GPUS) if gpu is None else gpu) if several else [gpu]
    cards = [_with_rates(limited(one, margin)) for one in named]
    if not cards:
        raise ValueError(f"gpu is {gpu!r}: allowed are {', '.join(GPUS)}, or a number of bytes")
    if question.ranks > 1 and len(cards) > 1:
        raise ValueError(f"ranks is {question.ranks} and gpu names {len(cards)} cards: name one")
    if several and len(cards) > 1:
        with gc_frozen():
            return _which_card(question, cards, margin)
    search = _Search(question, cards[0], margin)
    with gc_frozen(), tqdm(desc="planning", leave=False, bar_format=BAR) as search.progress:
        return search.plan()


BAR = "{desc} [{elapsed}]"


class _Search:
    """The search for one question on one card."""

    def __init__(self, question: Question, card: GPU, margin: float, progress=None):
        self.question, self.card, self.margin, self.progress = question, card, margin, progress
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
        self.batches = [n for n in range(1, self.effective + 1) if self.effective % n == 0]
        self.combinations, self.excluded = combinations(question, card, refused or "")
        self.surplus: dict[str, int] = {}
        self.sizes: dict[tuple, tuple] = {}
        self.footprints: dict[tuple, Footprint] = {}

    def plan(self) -> Plan:
        """The whole answer."""
        options = {one: self.largest(one) for one in self.combinations}
        options, fastest, roomiest = self.fastest_and_smallest(options)
        ways = self.best_of_each_way(options, fastest)
        start, footprint = self.start()
        switches = self.switches(start)
        return Plan(
            self.question,
            self.card,
            self.named(fastest),
            self.named(roomiest),
            {way: self.named(option) for way, option in ways.items()},
            self.named(start),
            switches,
            decision(start, footprint, switches, self.room),
            () if fastest else tuple(self.remedies(options)),
            self.excluded,
            _assumed(self.question),
        )

    # ------------------------------------------------------------------ recipes and their bytes

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
        }
        if one.way != "full":
            values["lora_rank"] = asked.lora_rank
        if one.way == "qlora":
            values |= NF4
        return Recipe(**values | changes)

    def footprint(self, recipe: Recipe) -> Footprint:
        """What the formula says, or a simulation where there is no formula."""
        key = (_trace_key(recipe), recipe.batch_size, recipe.accumulation, recipe.seq_len)
        if key not in self.footprints:
            self.footprints[key] = _quick(recipe, self.card, self.question.link, self.say)
        return self.footprints[key]

    def named(self, option: Option | None) -> Option | None:
        """The option with the model as the reader named it, and not as the config it stands for."""
        if option is None or not isinstance(self.question.model, str):
            return option
        recipe = option.recipe.but(model=self.question.model, task=option.recipe.task)
        return dataclasses.replace(option, recipe=recipe)

    def option(self, recipe: Recipe) -> Option:
        """A recipe by the formula: the bytes of its blocks, without what their order adds."""
        needed = self.footprint(recipe).peak_allocated + self.card.context
        total = self.card.total_memory
        return Option(recipe, needed, total - self.room, total, self.seconds(recipe), False)

    def seconds(self, recipe: Recipe) -> float | None:
        """The estimated seconds of a step; None with states that move, which takes unknown ones."""
        time = self.footprint(recipe).step_time
        return None if is_paged(recipe.optimizer) else time and time.expected

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

    # ------------------------------------------------------------------ simulations

    def simulate_until_stable(
        self, options: dict[Combination, Option]
    ) -> dict[Combination, Option]:
        """The options; the best of those that fit is a simulated one."""
        options = dict(options)
        for _ in range(TRACES):
            best = self.fastest_of(_fitting(options))
            if best is None:  # it may be the formula that lacks some bytes
                best = min(options, key=lambda one: options[one].missing)
                if options[best].missing > NEAR * self.card.total_memory:
                    break
            if options[best].simulated:
                break
            options[best] = self.confirmed(options[best])
            options = {
                one: it if it.simulated else self.largest(one) for one, it in options.items()
            }
        return options

    def told(self, options: dict[Combination, Option]) -> Combination:
        """The best of what fits in a simulation; else the one that lacks least."""
        while True:
            best = self.fastest_of(
                {one: it for one, it in _fitting(options).items() if it.simulated}
            )
            least = min(options, key=lambda one: (options[one].missing, options[one].needed))
            if best or options[least].missing:
                return best or least
            options[least] = self.confirmed(options[least])

    def best_of_method(self, options: dict[Combination, Option]) -> Option:
        """The best of a way, simulated only where something better may fit than surely does.

        What loading a quantized base leaves behind is known from a simulation only.
        """
        (way,) = {one.way for one in options}
        if self.question.ranks == 1 and (way != "qlora" or (way, "ddp") in self.surplus):
            surely = {one: self.largest(one, self.upper_bound) for one in options}
            surely = {one: it for one, it in surely.items() if not it.missing}
            best, hoped = self.fastest_of(surely), self.fastest_of(_fitting(options))
            if best and self.time(surely[best]) <= (1 + ALIKE) * self.time(options[hoped]):
                return surely[best]
        options = self.simulate_until_stable(options)
        return options[self.told(options)]

    def confirmed(self, option: Option) -> Option:
        """The option as a simulation has it, with the largest micro-batch that it allows, or 1."""
        recipe, effective = option.recipe, self.effective
        while True:
            largest = self.size(recipe, "batch_size")[0]
            if recipe.accumulation == 1 and largest < effective > 1:
                # Gradients that wait for the next micro-batch are another training.
                recipe = self._cut(recipe, self.batches[-2])
                continue
            allowed = [n for n in self.batches if n <= largest and n < effective]
            if recipe.accumulation > 1:
                recipe = self._cut(recipe, max(allowed, default=1))
            return self.judged(recipe)

    def _cut(self, recipe, batch) -> Recipe:
        return recipe.but(batch_size=batch, accumulation=self.effective // batch)

    def judged(self, recipe: Recipe) -> Option:
        """A recipe as a simulation has it."""
        said = verdict(recipe, self.log(recipe), self.card, self.margin)
        drawn = said.reserved_range
        drawn = drawn and tuple(self.card.context + end for end in drawn)
        total, seconds = self.card.total_memory, self.seconds(recipe)
        option = Option(recipe, said.needed, said.margin, total, seconds, True, drawn)
        self.note_surplus(option)
        return option

    def note_surplus(self, option: Option) -> None:
        """Remember what an option that is simulated needs beyond the formula."""
        more = option.needed - self.option(option.recipe).needed
        self.surplus[option.way, option.recipe.sharding] = max(0, more)

    def size(self, recipe: Recipe, field: str) -> tuple[int, int | None]:
        """As `largest_size`."""
        other = recipe.seq_len if field == "batch_size" else recipe.batch_size
        key = _trace_key(recipe), recipe.accumulation > 1, field, other
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
        self.progress.set_description(text)

    # ------------------------------------------------------------------ parts of the answer

    def fastest_of(self, options: dict[Combination, Option]) -> Combination | None:
        """The plainest of those that are about as fast as the fastest.

        What pages comes last, because nobody knows the seconds of moving its states.
        """
        settled = {one: it for one, it in options.items() if not is_paged(one.optimizer)}
        seconds = {one: self.time(it) for one, it in (settled or options).items()}
        least = min(seconds.values(), default=None)
        return next((one for one, time in seconds.items() if time <= (1 + ALIKE) * least), None)

    def fastest_and_smallest(self, options: dict) -> tuple[dict, Option | None, Option | None]:
        """The options, the best one simulated; that one and what leaves most room, if any fits."""
        options, fastest = self.fastest(options)
        if fastest is None:
            return options, None, None
        roomiest = self.with_sizes(self.judged(self.least_by_formula(fastest)))
        return options, fastest, min(roomiest, fastest, key=lambda option: option.needed)

    def fastest(self, options: dict) -> tuple[dict, Option | None]:
        """The options, the best one simulated, and that one with its sizes if it fits."""
        options = self.simulate_until_stable(options)
        best = options[self.told(options)]
        return options, None if best.missing else self.with_sizes(best)

    def least_by_formula(self, fastest: Option) -> Recipe:
        """What leaves the most room by the formula, of the like what trains as the fastest does."""
        recipes = [self.recipe(one, 1) for one in self.combinations]
        needed = [self.option(recipe).needed for recipe in recipes]
        most = min(needed) + SAME_ROOM * self.card.total_memory
        alike = [it for it, there in zip(recipes, needed, strict=True) if there <= most]
        same = _trace_key(fastest.recipe)
        return next((it for it in alike if _trace_key(it) == same), alike[0])

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

    def best_of_each_way(self, options, fastest: Option | None) -> dict[str, Option]:
        """The best of each way that can be had at all."""
        best = {}
        for way in {one.way: None for one in options}:
            of_way = {one: it for one, it in options.items() if one.way == way}
            if fastest and fastest.way == way:
                best[way] = fastest
            elif any(it.simulated and not it.missing for it in of_way.values()):
                best[way] = of_way[self.told(of_way)]
            else:
                best[way] = self.best_of_method(of_way)
        return best

    def start(self) -> tuple[Option, Footprint]:
        """The plain recipe of the first way, by the formula."""
        recipe = self.recipe(self.combinations[0], 1)
        return self.option(recipe), self.footprint(recipe)

    def switches(self, start: Option) -> tuple[Switch, ...]:
        """Single changes of the first recipe, the one that saves most first."""
        first, changed = self.combinations[0], {}
        named = {"way": WAYS, "checkpointing": {True: "checkpointing"}}
        for one in self.combinations:
            fields = dataclasses.asdict(one)
            other = {k: v for k, v in fields.items() if v != getattr(first, k)}
            if one.way != first.way and other.keys() <= {"way", "precision"}:
                changed.setdefault(WAYS[one.way], self.recipe(one, 1))
            elif len(other) == 1:
                ((name, value),) = other.items()
                value = named.get(name, {}).get(value, value)
                changed[f"{value}{PAGED_OUT * is_paged(one.optimizer)}"] = self.recipe(one, 1)
        if len(self.batches) > 1:
            changed[f"micro-batch {self.batches[1]}"] = self.recipe(first, self.batches[1])
        if self.question.seq_len > 1:
            half = self.question.seq_len // 2
            changed[f"{half:,} tokens"] = self.recipe(first, 1, seq_len=half)
        switches = []
        for name, recipe in changed.items():
            option = self.option(recipe)
            known = option.seconds and start.seconds
            slower = option.seconds - start.seconds if known else None
            switches.append(Switch(name, start.needed - option.needed, slower, not option.missing))
        return tuple(sorted(switches, key=lambda switch: -switch.saved))

    def remedies(self, options: dict[Combination, Option]) -> list[str]:
        """What would fit where nothing does: another way, a shorter sequence, a larger card."""
        found = []
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
        for card in sorted(GPUS.values(), key=lambda card: card.total_memory):
            if card.total_memory > self.card.total_memory and computes(card, self.question):
                option = self.other(card)
                if option:
                    found.append(f"{card.name}, with {option}")
                    break
        return found or ["none of memlab's cards: see the book's chapter 17-parallel"]

    def other(self, card: GPU, **changes) -> Option | None:
        """The best of what fits a card when the question is changed; None where nothing does."""
        question = dataclasses.replace(self.question, **changes)
        try:
            search = _Search(question, card, self.margin, self.progress)
        except ValueError:  # no adapters for this model, or no such way with ranks
            return None
        search.surplus |= self.surplus
        return search.certain_fit()

    def certain_fit(self) -> Option | None:
        """The best option that fits for sure by the formula, and of ranks by a simulation."""
        if self.question.ranks == 1:
            options = {one: self.largest(one, self.upper_bound) for one in self.combinations}
            best = self.fastest_of(_fitting(options))
            return best and options[best]
        options = self.simulate_until_stable({one: self.largest(one) for one in self.combinations})
        best = options[self.told(options)]
        return None if best.missing else best


def _which_card(question: Question, cards: list[GPU], margin: float) -> Cards:
    """The smallest card of each way, simulated; the others by the formula."""
    cards = sorted(cards, key=lambda card: card.total_memory)
    cards = [card for card in cards if computes(card, question)] or cards[:1]
    bar = tqdm(cards, leave=False)
    options, smallest = {}, dict.fromkeys(question.ways)
    for card in bar:
        search = _Search(question, card, margin, bar)
        search.say(f"planning for {card.name}")
        every = {one: search.largest(one) for one in search.combinations}
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
    bar.close()
    return Cards(question, options, smallest, _assumed(question))


# ---------------------------------------------------------------------- words


CAN_REDUCE = {
    Category.PARAMETERS: "QLoRA",
    Category.GRADIENTS: "LoRA and QLoRA",
    Category.OPTIMIZER_STATES: "an 8-bit or paged optimizer, LoRA and QLoRA",
    Category.ACTIVATIONS: "checkpointing, a smaller micro-batch and shorter sequences",
    Category.TEMPORARY: "a smaller micro-batch and shorter sequences",
}


def decision(start: Option, footprint: Footprint, switches, room: int) -> tuple[str, ...]:
    """What decides, in sentences, from what the plain recipe's peak is made of."""
    states = sum(footprint.breakdown.get(name, 0) for name in STATES)
    largest = max(CAN_REDUCE, key=lambda name: footprint.breakdown.get(name, 0))
    name, way = largest.replace("_", " "), WAYS[start.way]
    share = footprint.breakdown[largest] / footprint.peak_allocated
    most = (
        f"The largest part is {name}, {share:.0%} of the peak, in the {footprint.peak_phase}: "
        f"less of it by {CAN_REDUCE[largest]}."
    )
    enough = [switch.name for switch in switches if switch.fits]
    helps = f"Enough by itself: {', '.join(enough)}." if enough else "No single switch is enough."
    if not start.missing:
        return (f"{way[0].upper()}{way[1:]} fits as it is.", most)
    if states + start.needed - footprint.peak_allocated > room:
        return (
            f"Parameters, gradients and optimizer states are {gib(states)} where {gib(room)} may "
            "be used: checkpointing, a smaller micro-batch and shorter sequences cannot help.",
            f"{most} {helps}",
        )
    return (
        f"Parameters, gradients and optimizer states are {gib(states)} of the {gib(room)} that may "
        f"be used, and the rest of the peak {gib(footprint.peak_allocated - states)}.",
        f"{most} {helps}",
    )


# ---------------------------------------------------------------------- helpers


def _fitting(options: dict[Combination, Option]) -> dict[Combination, Option]:
    return {one: option for one, option in options.items() if not option.missing}


def _quick(recipe: Recipe, card: GPU, link: str | None, say) -> Footprint:
    """The footprint by the formula, derived where it is not known; else simulated."""
    like = card if card.name in GPUS else dataclasses.replace(card, name=LIKE.name)  # its links
    recipe = recipe.but(max_grad_norm=0)  # clipping holds less than a MiB
    try:
        found = formula(recipe, like, link)
        for assumed in found.assumptions:
            warnings.warn(assumed, stacklevel=2)
        return found
    except ValueError:
        pass
    try:
        say(f"deriving a formula for {described(recipe)}")
        derive(recipe, card)
        return formula(recipe, like, link)
    except ValueError:
        say(f"simulating {described(recipe)} on {card.name}")
        return simulate(recipe, like.without_limit(), link)


def _trace_key(recipe: Recipe) -> tuple:
    """What a trace depends on, apart from sizes."""
    return (
        way_of(recipe),
        recipe.precision,
        recipe.optimizer,
        recipe.checkpointing,
        recipe.sharding,
    )


def _assumed(question: Question) -> tuple[str, ...]:
    """What the answer to a question assumes of its model."""
    changes = {"lora_rank": 1} | NF4
    changes = changes if "qlora" in question.ways else {}
    config = models.published(question.model)
    return assumed(Recipe(config, question.task, seq_len=1, **changes))


def _with_rates(card: GPU) -> GPU:
    """The card; one that is only bytes is as quick as an A100, whose other rules it has."""
    if card.bandwidth is None:
        return dataclasses.replace(card, rates=LIKE.rates, bandwidth=LIKE.bandwidth)
    return card
