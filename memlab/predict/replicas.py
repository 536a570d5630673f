"""One of several replicas of a model, from the run of one card alone.

DistributedDataParallel holds a second copy of all gradients, in buckets that do not follow layers:
a run of it is one of all layers, up to 40 times as long as a trace. `memlab.simulate` makes that
run. A plan, which asks for dozens, adds what replicas add, as PyTorch does it
(torch/csrc/distributed/c10d/reducer.cpp and comm.cpp), and says so.

Known limitations: buckets take small weights before large ones, not in the order of their
gradients, and a model's own buffers, which each step sends, are left out. Peaks are within 1 % of
such runs.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from memlab.card.collectives import share
from memlab.footprint import Category, Phase
from memlab.gpus import GPU
from memlab.predict import simulate
from memlab.predict.recipe_log import gradient_bytes, is_deep
from memlab.predict.simulate import sized_log
from memlab.spec.recipe import Recipe
from memlab.trace.events import OUTSIDE, Alloc, Free, Marker, TraceEvent
from memlab.trace.log import Event, Log
from memlab.trace.work import Work
from memlab.units import MiB

ADDED = "ranks of ddp: one card's run with DDP's buckets added; memlab simulate runs a rank whole"
BUCKET = 25 * MiB  # DistributedDataParallel's bucket_cap_mb
SENT, IN_FLIGHT = 250 * MiB, 2  # its broadcast_bucket_size; kMaxInFlight of comm.cpp


def log_of(recipe: Recipe, card: GPU) -> Log:
    """As `memlab.predict.simulate.sized_log`, of a replica by one card's trace."""
    if not is_replicated(recipe):
        return sized_log(recipe, card)
    return replica(sized_log(recipe.but(ranks=1), card), recipe)


def peak_allocated_of(recipe: Recipe, card: GPU) -> int:
    """As `memlab.predict.simulate.peak_allocated_of`, of a replica by one card's trace."""
    if not is_replicated(recipe):
        return simulate.peak_allocated_of(recipe, card)
    single = recipe.but(ranks=1)
    gradients = sized_log(single, card).trainable_parameters * gradient_bytes(recipe)
    return simulate.peak_allocated_of(single, card) + gradients


def is_replicated(recipe: Recipe) -> bool:
    """Whether each rank holds the whole of a model whose layers take long to run one by one."""
    return recipe.ranks > 1 and recipe.sharding == "ddp" and is_deep(recipe)


def replica(log: Log, recipe: Recipe) -> Log:
    """The log of a rank of a replicated recipe; log: that of the recipe on one card alone."""
    size = gradient_bytes(recipe)
    trained = {elements: times for (elements, free), times in log.weights.items() if free}
    weights = [size * elements for elements in sorted(trained) for _ in range(trained[elements])]
    buckets = chunks(weights, BUCKET)
    # Each gradient is copied into its bucket and, when all ranks have sent theirs, back.
    work = Counter(Work(moved=(nbytes, nbytes)) for nbytes in 2 * weights)
    sent = share("allreduce_", recipe.ranks)
    work.update(Work(sent=round(nbytes * sent)) for nbytes in buckets)
    added, done = (*log.assumptions, ADDED), log.work + work
    return ReplicaLog([], log.weights, added, done, single=log, buckets=buckets)


@dataclass(frozen=True, kw_only=True)
class ReplicaLog(Log):
    """The log of one card with what DistributedDataParallel makes when it wraps the model.

    single: that log. buckets: their bytes.
    """

    single: Log
    buckets: list[int]

    def events(self) -> Iterator[Event]:
        """As `Log.events`. One bucket holds all until their order is known, in the second step."""
        events = list(self.single.events())
        measured = next(at for at, (_, step) in enumerate(events) if step is Marker.RESET)
        places = range(measured, len(events))
        second = next((at for at in places if _is_forward(events[at][1])), measured)
        loaded, living = 0, {}
        for at, (name, step) in enumerate(events[:measured]):
            if type(step) is Alloc and step.category is Category.PARAMETERS:
                living[name], loaded = step, at + 1
            elif type(step) is Free:
                living.pop(name, None)
        yield from events[:loaded]
        yield from sent_weights(list(living.values()))
        every = _alloc(Category.GRADIENTS, sum(self.buckets))
        yield "bucket of all", every
        yield from events[loaded:second]
        yield "bucket of all", Free(every, Phase.FORWARD, 0)
        for number, nbytes in enumerate(self.buckets):
            yield ("bucket", number), _alloc(Category.GRADIENTS, nbytes)
        yield from events[second:]


def _is_forward(step: TraceEvent) -> bool:
    return type(step) is Alloc and step.phase == Phase.FORWARD


def sent_weights(weights: list[Alloc]) -> Iterator[Event]:
    """The first rank sends its weights to the others, of each dtype in chunks, two at a time."""
    items = dict.fromkeys(weight.item for weight in weights)
    sent = [chunks([w.nbytes for w in weights if w.item == item], SENT) for item in items]
    waiting: list[Event] = []
    for number, nbytes in enumerate(itertools.chain(*sent)):
        if len(waiting) == IN_FLIGHT:
            yield waiting.pop(0)
        name, alloc = ("weights", number), _alloc(Category.TEMPORARY, nbytes)
        waiting.append((name, Free(alloc, Phase.FORWARD, 0)))
        yield name, alloc
    yield from waiting


def chunks(sizes: list[int], full: int) -> list[int]:
    """Bytes of the chunks into which tensors go in their order; one is closed when it is full."""
    filled = [0]
    for nbytes in sizes:
        if filled[-1] >= full:
            filled.append(0)
        filled[-1] += nbytes
    return filled


def _alloc(category: Category, nbytes: int) -> Alloc:
    return Alloc(nbytes, category, Phase.FORWARD, OUTSIDE, "aten.empty")
