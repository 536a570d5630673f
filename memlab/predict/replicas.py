"""The log of one DistributedDataParallel rank, derived from the log of a single GPU.

DistributedDataParallel holds a second copy of all gradients, in buckets that span layers. A
simulation must therefore run all layers, up to 40 times as long as a trace takes. `memlab.simulate`
makes that run. A plan asks about dozens of recipes, so it adds the buckets and the broadcast to the
log of one GPU instead. It reports this as an assumption. The rules are those of PyTorch's
torch/csrc/distributed/c10d/reducer.cpp and comm.cpp.

Known limitations: buckets are filled in the order of the weights' sizes, not in that of their
gradients. PyTorch's smaller first bucket (1 MiB) is left out, and so are a model's own buffers,
which each step broadcasts. Peaks are within 1 % of a full run.
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

ADDED = "ranks of ddp: one card's run plus DDP's buckets; memlab simulate runs a whole rank"
BUCKET = 25 * MiB  # bytes at which a bucket is closed: bucket_cap_mb of DistributedDataParallel
# The broadcast of the weights when a model is wrapped: bytes of a chunk (broadcast_bucket_size of
# DistributedDataParallel), and chunks at a time (`broadcast_coalesced` in comm.cpp).
SENT, IN_FLIGHT = 250 * MiB, 2


def log_of(recipe: Recipe, card: GPU) -> Log:
    """As `memlab.predict.simulate.sized_log`, but from a single GPU's trace for a DDP rank."""
    if not is_replicated(recipe):
        return sized_log(recipe, card)
    return replica(sized_log(recipe.but(ranks=1), card), recipe)


def peak_allocated_of(recipe: Recipe, card: GPU) -> int:
    """As `memlab.predict.simulate.peak_allocated_of`, but from a single GPU's trace for a DDP rank.

    The buckets together have the bytes of all gradients, and they stay allocated.
    """
    if not is_replicated(recipe):
        return simulate.peak_allocated_of(recipe, card)
    single = recipe.but(ranks=1)
    gradients = sized_log(single, card).trainable_parameters * gradient_bytes(recipe)
    return simulate.peak_allocated_of(single, card) + gradients


def is_replicated(recipe: Recipe) -> bool:
    """Whether the recipe trains a deep model under DistributedDataParallel."""
    return recipe.ranks > 1 and recipe.sharding == "ddp" and is_deep(recipe)


def replica(log: Log, recipe: Recipe) -> Log:
    """The log of one rank of a replicated recipe.

    log: the log of the same recipe with one rank.
    """
    size = gradient_bytes(recipe)
    # A log knows how many weights there are of each number of elements, but not their order.
    trained = {elements: times for (elements, free), times in log.weights.items() if free}
    weights = [size * elements for elements in sorted(trained) for _ in range(trained[elements])]
    buckets = chunks(weights, BUCKET)
    # Each gradient is copied into its bucket and, after the all-reduce, back again: reducer.cpp,
    # `mark_variable_ready_dense` and `finalize_bucket_dense`. A copy reads and writes its bytes.
    work = Counter(Work(moved=(nbytes, nbytes)) for nbytes in 2 * weights)
    sent = share("allreduce_", recipe.ranks)
    work.update(Work(sent=round(nbytes * sent)) for nbytes in buckets)
    added, done = (*log.assumptions, ADDED), log.work + work
    return ReplicaLog([], log.weights, added, done, single=log, buckets=buckets)


@dataclass(frozen=True, kw_only=True)
class ReplicaLog(Log):
    """The log of one GPU with the allocations of DistributedDataParallel added.

    single: the log of one GPU. buckets: bytes of each bucket of gradients.
    """

    single: Log
    buckets: list[int]

    def events(self) -> Iterator[Event]:
        """As `Log.events`.

        In the first step a single bucket holds all gradients, because the order in which they
        become ready is not known yet. DistributedDataParallel rebuilds the buckets in the forward
        pass of the second step.
        """
        events = list(self.single.events())
        measured = next(at for at, (_, step) in enumerate(events) if step is Marker.RESET)
        places = range(measured, len(events))
        second = next((at for at in places if _is_forward(events[at][1])), measured)
        # The model is wrapped once it is complete: after the last parameter that is allocated in
        # the first step. `living` are the parameters that exist then, which are broadcast.
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
        # Before the forward pass allocates anything: `DistributedDataParallel._pre_forward` calls
        # `_rebuild_buckets` first, to keep the peak low.
        yield "bucket of all", Free(every, Phase.FORWARD, 0)
        for number, nbytes in enumerate(self.buckets):
            yield ("bucket", number), _alloc(Category.GRADIENTS, nbytes)
        yield from events[second:]


def _is_forward(step: TraceEvent) -> bool:
    return type(step) is Alloc and step.phase == Phase.FORWARD


def sent_weights(weights: list[Alloc]) -> Iterator[Event]:
    """The buffers of the broadcast in which the first rank sends its weights to the other ranks.

    `broadcast_coalesced` in comm.cpp flattens the weights of one dtype into chunks, and keeps two
    chunks in flight. Here weights with elements of the same size count as one dtype.
    """
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
    """Bytes of the chunks that tensors of these sizes fill in order.

    A chunk is closed once it holds at least `full` bytes: `compute_bucket_assignment_by_size` in
    reducer.cpp.
    """
    filled = [0]
    for nbytes in sizes:
        if filled[-1] >= full:
            filled.append(0)
        filled[-1] += nbytes
    return filled


def _alloc(category: Category, nbytes: int) -> Alloc:
    return Alloc(nbytes, category, Phase.FORWARD, OUTSIDE, "aten.empty")
