"""One trace for every micro-batch and every length.

Of a recipe whose micro-batch and length are primes (times a power of two) that divide nothing of
the model, the bytes of each storage say how often either is a factor of them. So the log of one
such training holds those of all others in the same order of events, and an allocator serves each
in a fraction of a second. Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from memlab import models
from memlab.card.loading import loaded_by_transformers, peak_reserved
from memlab.footprint import Category, Phase
from memlab.gpus import GPU
from memlab.recipe import Recipe
from memlab.simulation import full_log, peak_reserved_of
from memlab.trace.allocator import MIN_BLOCK
from memlab.trace.events import Birth, Death, Mark, Step
from memlab.trace.log import Event, Log
from memlab.units import round_up

PRIMES = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
TIMES = 8  # masks have their rows in eights
# What attention takes beside its results has a length that is rounded up: the sums of the
# memory-efficient kernel, and what flash's backward takes (`memlab.card.kernels.kernel_scratch`).
ROUNDED = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 32,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: 128,
}


@dataclass(frozen=True)
class _Resized(Log):
    """A log in which every storage has the bytes of another micro-batch and another length.

    known: (number of the storage or None, step, place among the births or -1) of the log that was
    traced; births: as they are now. Births that become alike are still told apart by number.
    """

    known: list[tuple[int | None, Step, int]] = field(default_factory=list)
    births: list[Birth] = field(default_factory=list)

    def events(self) -> Iterator[Event]:
        """As `Log.events`."""
        births = self.births
        return ((number, births[i] if i >= 0 else step) for number, step, i in self.known)


class SizedLog:
    """The logs of a recipe on a card for all micro-batches and lengths, from one simulation.

    If it accumulates, so may those that are asked for, over other numbers of micro-batches.

    longest: the tokens up to which they hold, None for no end. Beyond a window of attention, or
    below it, a model computes in another way, so they hold on the side where the recipe is.

    run: as in `memlab.trace.depth.log_at_full_depth`.
    """

    def __init__(self, recipe: Recipe, card: GPU, run=map):
        config = models.config(recipe.model)
        window = getattr(config, "sliding_window", None)
        inside = window is None or recipe.seq_len <= window
        self.longest = models.max_length(config)
        if inside and window is not None:
            self.longest = min(window, self.longest or window)
        batch, length = _primes(recipe)
        times = TIMES
        while self.longest is not None and times > 1 and length * times > self.longest:
            times //= 2
        while not inside and length * times <= window:
            times *= 2
        self._batch, self._prime, self._length = batch, length, length * times
        primed = replace(recipe, batch_size=batch, seq_len=self._length)
        self._log = full_log(primed, card, run=run)
        self._places: dict[Birth, int] = {}
        self._events = [
            (number, step, self._place(step) if type(step) is Birth else -1)
            for number, step in self._log.events()
        ]
        self._accumulation = recipe.accumulation
        self._changes = self._of_second_step()
        self._served: dict[int | None, list[tuple[int | None, Step, int]]] = {}

    def _place(self, birth: Birth) -> int:
        return self._places.setdefault(birth, len(self._places))

    def at(self, recipe: Recipe) -> Log:
        """The log of the recipe with another `batch_size` and `seq_len`, without its work."""
        log, sizes = self._log, self._sizes(recipe)
        births = [b._replace(nbytes=n) for b, n in zip(self._places, sizes, strict=True)]
        events = self._with_batches(self._events, recipe.accumulation)
        return _Resized(log.steps, log.weights, log.assumptions, known=events, births=births)

    def _with_batches(self, events: list, accumulation: int) -> list:
        """The events with the tokens of so many micro-batches, which come before the first step."""
        more = accumulation - self._accumulation
        if not more:
            return events
        given = [i for i, (_, step, _) in enumerate(events) if _is_given(step)]
        each, end = len(given) // self._accumulation, given[-1] + 1
        last = events[end - each : end]
        added = [((number, i), *rest) for i in range(more) for number, *rest in last]
        return events[: end + min(0, more) * each] + added + events[end:]

    def is_served(self, recipe: Recipe, card: GPU) -> bool:
        """Whether a card's allocator can serve a size, without sorting events again.

        In which order a quantized base is loaded, and by how large a block that is begun, is the
        same at every size.
        """
        if recipe.base == "none":
            return peak_reserved_of(recipe, self.at(recipe), card) is not None
        total = card.total_memory
        if total not in self._served:
            own = replace(
                recipe,
                batch_size=self._batch,
                seq_len=self._length,
                accumulation=self._accumulation,
            )
            self._served[total] = [
                (number, step, self._places.get(step, -1))
                for number, step in loaded_by_transformers(self.at(own), total)
            ]
        births = self.at(recipe).births
        served = self._with_batches(self._served[total], recipe.accumulation)
        events = ((n, births[i] if i >= 0 else step) for n, step, i in served)
        return peak_reserved(events, card.usable) is not None

    def least(self, recipe: Recipe) -> int:
        """Bytes below which no allocator can serve a size, in a fraction of a replay's time.

        The most that the second step has allocated at once, each tensor in a block of its own size.
        """
        blocks = round_up(np.array(self._sizes(recipe)), MIN_BLOCK)
        places, signs, start, given = self._changes
        most = int((signs * blocks[places]).cumsum()[start:].max())
        more = recipe.accumulation - self._accumulation
        return most + int(blocks[given].sum()) * more // self._accumulation

    def _of_second_step(self) -> tuple[np.ndarray, np.ndarray, int, list[int]]:
        """(whose bytes come or go, 1 or -1) of each change, where the second step begins, and
        which bytes are those of tokens."""
        places, changes, start = {}, [], 0
        given = [place for _, step, place in self._events if _is_given(step)]
        for number, step, place in self._events:
            if type(step) is Birth:
                places[number] = place
                changes.append((place, 1))
            elif type(step) is Death:
                changes.append((places[number], -1))
            elif step is Mark.RESET:
                start = len(changes)
        return *np.array(changes).T, start, given

    def _sizes(self, recipe) -> list[int]:
        return [self._nbytes(recipe.batch_size, recipe.seq_len, birth) for birth in self._places]

    def _nbytes(self, batch: int, length: int, birth: Birth) -> int:
        size, times = birth.nbytes, 1
        if birth.phase == Phase.STEP or size <= 0:
            return size
        if size % self._batch == 0:
            size, times = size // self._batch, batch
            unit = ROUNDED.get(birth.operation)
            if unit and size % self._prime:  # a result of the kernel has the length as it is
                return size // round_up(self._length, unit) * times * round_up(length, unit)
            if size % (self._length + 1) == 0:  # shifted labels are padded by one token
                return size // (self._length + 1) * times * (length + 1)
        below = 1
        while size % self._prime == 0:
            size, times = size // self._prime, times * length
            below *= self._length // self._prime
        return -(-size * times // below)


def _is_given(step: Step) -> bool:
    """Whether it is the birth of tokens or labels of a micro-batch."""
    return type(step) is Birth and step.category == Category.INPUTS


def _primes(recipe: Recipe) -> tuple[int, int]:
    """Two primes that divide no size of the model: for the micro-batch and for the length."""
    config = models.with_layers(recipe.model, 2)
    with torch.device("meta"):
        model = models.build(config, recipe.task)
    sizes = {size for weight in model.parameters() for size in weight.shape}
    sizes |= {value for value in vars(config).values() if type(value) is int and value}
    sizes.add(recipe.lora_rank or 1)
    free = [prime for prime in PRIMES if all(size % prime for size in sizes)]
    return free[1], free[0]
