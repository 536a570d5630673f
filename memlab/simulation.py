"""The memory of a recipe's step on a card that need not be there."""

import contextlib
import gc
import traceback
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm.auto import tqdm

from memlab import models
from memlab.card.gpu import SimulatedGPU
from memlab.card.links import link_rate
from memlab.card.loading import (
    loaded_by_transformers,
    loaded_weights,
    peak_reserved,
    reserved_range,
)
from memlab.card.memory import CardMemory, card_footprint
from memlab.card.work import NORMS, repeat_micro_batch, without_trifles
from memlab.footprint import Footprint
from memlab.gpus import ANY_CARD, GPU, find_gpu, require_native
from memlab.quantized import assumed
from memlab.recipe import Recipe
from memlab.sharding import is_moved_by_sharding
from memlab.trace.depth import log_at_full_depth
from memlab.trace.events import Mark
from memlab.trace.ledger import Ledger
from memlab.trace.log import Event, Log, replay
from memlab.training import Training, import_libraries


def simulate(
    recipe: Recipe, gpu: GPU | str | int | None = None, link: str | None = None
) -> Footprint:
    """The memory of one optimizer step of `recipe` on a GPU that need not be there.

    gpu: a name of `memlab.gpus.GPUS`, a number of bytes, or None for a card without a limit.
    link: between several ranks, as `SimulatedGPU` has it.

    Two steps run; the second is counted, because optimizer states appear in the first. Of a model
    with many equal layers only a few run, and `memlab.trace.depth` writes the others into the log.

    A quantized base comes to the card as today's `from_pretrained` loads it, or one layer after the
    other where ranks split it. The order leaves
    other free blocks behind, and so other rests of split ones, than a model that is moved whole,
    as `memlab.measure` moves it: `reserved_range` holds the lowest and the highest peak reserved of
    the orders that `memlab.card.loading` tries, which are a sample and no proven bound.

    A `memlab.serving.Serving` in place of the recipe gives a `ServingFootprint`: inference, with
    the peaks of prefill and decode apart.

    Raises torch.OutOfMemoryError in PyTorch's own words when the card is too small, and ValueError
    when it does not have the recipe's number format.
    """
    card = find_gpu(gpu)
    if not isinstance(recipe, Recipe):
        from memlab.generation import simulate_serving  # it brings all caches of transformers

        return simulate_serving(recipe, card)
    if link is not None:
        link_rate(card, link)  # or refuses
    return serve(recipe, full_log(recipe, card), card, link)


def full_log(recipe: Recipe, card: GPU, loop=None, run=map) -> Log:
    """What two steps of `recipe` do to memory on a card of this kind, whatever its size.

    loop: another training loop than memlab's own, a function like `two_steps`. run: as in
    `log_at_full_depth`.
    """
    for precision in (recipe.precision, recipe.compute_dtype or ""):
        require_native(precision, card.name, "bfloat16" in card.native_dtypes)
    import_libraries(recipe)
    with only_new_garbage():
        log = log_at_full_depth(recipe, partial(shallow_log, gpu=card, loop=loop), run)
        log = log or log_of(recipe, card, numbered=True, loop=loop)
    return completed(recipe, log)


@contextlib.contextmanager
def only_new_garbage():
    """Let the garbage collector leave alone what is there already: the libraries.

    It goes through all of a million objects again and again while others come and go by the
    million, which takes up to a third of the time.
    """
    if gc.get_freeze_count():  # somebody does that already
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _one_thread():
    """Compute what has data in one thread: it is little, and the others wait for more by spinning.

    That takes a sixth more processor time, which a second process may want.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def serve(recipe: Recipe, log: Log, card: GPU, link: str | None = None) -> Footprint:
    """The footprint of a recipe's log, served by this card's allocator."""
    footprint = serve_without_range(recipe, log, card, link)
    return replace(footprint, reserved_range=range_of_reserved(recipe, log, card))


def serve_without_range(recipe: Recipe, log: Log, card: GPU, link: str | None = None) -> Footprint:
    """As `serve`, loaded in one way only, where a base could be loaded in several."""
    ledger = Ledger(CardMemory(card, statistics=False))
    replay(_as_loaded(recipe, log, card), ledger)
    return card_footprint(ledger, log, recipe.batch_size * recipe.accumulation, link)


def peak_reserved_of(recipe: Recipe, log: Log, card: GPU) -> int | None:
    """The peak reserved that `serve` finds, in half the time; None where it runs out of memory."""
    return peak_reserved(_as_loaded(recipe, log, card), card.usable)


def range_of_reserved(recipe: Recipe, log: Log, card: GPU) -> tuple[int, int] | None:
    """The range of the peak over the ways of loading a base; None where there is one way."""
    if not _comes_by_weight(recipe):
        return None
    return reserved_range(log, card.usable, card.total_memory)


def _as_loaded(recipe, log, card) -> Iterable[Event]:
    by_weight = _comes_by_weight(recipe)
    return loaded_by_transformers(log, card.total_memory) if by_weight else log.events()


def _comes_by_weight(recipe: Recipe) -> bool:
    """Whether `from_pretrained` loads the model and quantizes it, and not `sharding.share`."""
    return recipe.base != "none" and not is_moved_by_sharding(recipe)


def log_of(recipe: Recipe, gpu: GPU = ANY_CARD, numbered=False, loop=None, most=None) -> Log:
    """What `recipe` does to memory, at its own depth, on a card like `gpu` without a limit.

    numbered: whether the log tells layers apart. loop: as in `full_log`. most: births and deaths,
    beyond which it ends with a ValueError.
    """
    if not isinstance(recipe, Recipe):
        from memlab.generation import log_of_serving

        return log_of_serving(recipe, gpu, numbered)
    import_libraries(recipe)
    with _one_thread(), _OwnLoop(gpu.without_limit(), ranks=recipe.ranks) as simulated:
        simulated.tracer.most = most
        training = _run(loop or two_steps, recipe, simulated)
        marks = loaded_weights(simulated.tracer, training)
        work = simulated.tracer.work.of_step
        return Log.of(simulated.tracer, training.model, marks, numbered, work)


def shallow_log(recipe: Recipe, gpu: GPU, loop=None, most=None) -> Log:
    """`log_of`, for comparing depths: without the bytes of norms, which grow with each layer."""
    log = log_of(recipe, gpu, loop=loop, most=most)
    return replace(log, work=without_trifles(log.work, NORMS))


def _run(loop, recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """What a loop gives. Raises ValueError, in one line, for what its model or a library raises."""
    try:
        return loop(recipe, simulated)
    except (LookupError, RuntimeError, TypeError, AttributeError, AssertionError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = tuple(str(Path(module.__file__).parent) for module in (torch, models))
        theirs = (one for one in reversed(frames) if not one.filename.startswith(ours))
        at = next(theirs, frames[-1])
        raise ValueError(
            f"{recipe.model_name} does not train so ({Path(at.filename).name}:{at.lineno}): "
            f"{models.one_line(error)}"
        ) from error


def completed(recipe: Recipe, log: Log) -> Log:
    """The log with the work of all micro-batches that counts, and what is assumed of a recipe."""
    # Of more micro-batches some ran; the others do what the second did.
    times = max(1, recipe.accumulation - _unlike(recipe) + 1)
    work = without_trifles(repeat_micro_batch(log.work, times))
    return replace(log, work=work, assumptions=(*log.assumptions, *assumed(recipe)))


class _OwnLoop(SimulatedGPU):
    """A card for loops whose recipe says which libraries they need: bitsandbytes takes a second."""

    imports_bitsandbytes = False


def two_steps(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """Train two steps on a card that is entered, and count the second."""
    training = built(recipe, simulated)
    # The others repeat the bytes of the second; only the loss of each, a number of 512 bytes as an
    # allocator's block, would be added.
    held, training.batches = training.batches, training.batches[: _unlike(recipe)]
    for _ in tqdm(range(2), f"simulating {recipe.model_name}", leave=False, delay=2):
        simulated.reset_peak()
        losses = training.make_gradients()
        simulated.tracer.begin_update()
        training.update()
        simulated.tracer.mark(Mark.UPDATED)
        del losses
    training.batches = held
    return training


def _unlike(recipe: Recipe) -> int:
    """How many micro-batches of a step differ: the first makes gradients, the second adds to them.

    Of several ranks the last reduces them, too.
    """
    return 2 if recipe.ranks == 1 else 3


def built(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """A training on a card that is entered, watched, before its first step."""
    # A base is made on the host, and quantized weight by weight when it moves; so is what moves
    # to the card in shards.
    on_host = recipe.base != "none" or is_moved_by_sharding(recipe)
    built_in = None if on_host else simulated.device
    training = Training(recipe, simulated.device, built_in=built_in)
    simulated.watch(training.model, inputs=training.inputs)
    return training
