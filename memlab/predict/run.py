"""Runs of a recipe on a card that need not be there, at its own sizes and depth."""

import contextlib
import gc
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.card.op_work import NORMS, repeat_micro_batch, without_trifles
from memlab.gpus import ANY_CARD, GPU, require_native
from memlab.predict.progress import Progress
from memlab.spec.recipe import QUANTIZED, Recipe
from memlab.trace.events import Marker
from memlab.trace.log import Log
from memlab.trace.quantized_weights import numel
from memlab.workloads.optimizers import left_on_host
from memlab.workloads.quantized import assumed
from memlab.workloads.sharding import is_moved_by_sharding
from memlab.workloads.training import Training, import_libraries


def log_of(recipe: Recipe, gpu: GPU = ANY_CARD, numbered=False, loop=None, most=None) -> Log:
    """What `recipe` does to memory, at its own depth, on a card like `gpu` without a limit.

    numbered: whether the log tells layers apart. loop: as in `full_log`. most: births and deaths,
    beyond which it ends with a ValueError.
    """
    if not isinstance(recipe, Recipe):
        from memlab.predict.serving import log_of_serving

        return log_of_serving(recipe, gpu, numbered)
    import_libraries(recipe)
    with _one_thread(), _OwnLoop(gpu.without_limit(), ranks=recipe.ranks) as simulated:
        simulated.tracer.most = most
        training = _run(loop or two_steps, recipe, simulated)
        work = simulated.tracer.work.of_step
        return Log.of(simulated.tracer, weights_of(training.model), numbered, work)


def shallow_log(recipe: Recipe, gpu: GPU, loop=None, most=None) -> Log:
    """`log_of`, for comparing depths: without the bytes of norms, which grow with each layer."""
    log = log_of(recipe, gpu, loop=loop, most=most)
    return replace(log, work=without_trifles(log.work, NORMS))


def refuse_format(recipe: Recipe, card: GPU) -> None:
    """Raise ValueError where a card has no kernels for a number format, or an attention."""
    for precision in (recipe.precision, recipe.compute_dtype or ""):
        require_native(precision, card.name, "bfloat16" in card.native_dtypes)
    if recipe.attention == "flash_attention_2" and card.capability < (8, 0):
        raise ValueError(
            f"attention is 'flash_attention_2': {card.name} has compute capability "
            f"{'{}.{}'.format(*card.capability)}, flash-attn needs 8.0; allowed are eager, sdpa"
        )


def weights_of(model: torch.nn.Module) -> Counter:
    """How many parameters there are of (so many elements, trainable or not)."""
    return Counter((numel(weight), weight.requires_grad) for weight in model.parameters())


@contextlib.contextmanager
def _silent_transformers():
    """Without its warnings, such as that flash-attn casts what autocast leaves in fp32."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _run(loop, recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """What a loop gives. Raises ValueError, in one line, for what its model or a library raises."""
    try:
        with _silent_transformers():
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
    said = *log.assumptions, *assumed(recipe), *left_on_host(recipe, log.weights)
    return replace(log, work=work, assumptions=said)


class _OwnLoop(SimulatedGPU):
    """A card for loops whose recipe says which libraries they need: bitsandbytes takes a second.

    What they do on it is the same under any setting of the allocator.
    """

    imports_bitsandbytes = reads_environment = False


def two_steps(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """Train two steps on a card that is entered, and count the second."""
    training = built(recipe, simulated)
    # The others repeat the bytes of the second; only the loss of each, a number of 512 bytes as an
    # allocator's block, would be added.
    held, training.batches = training.batches, training.batches[: _unlike(recipe)]
    with Progress(range(2), f"simulating {recipe.model_name}") as steps:
        for _ in steps:
            simulated.reset_peak()
            losses = training.make_gradients()
            simulated.tracer.begin_update()
            training.update()
            simulated.tracer.mark(Marker.UPDATED)
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
    # A base is made on the host, and quantized weight by weight when it is loaded; so is what
    # moves to the card in shards.
    on_host = recipe.base in QUANTIZED or is_moved_by_sharding(recipe)
    built_in = None if on_host else simulated.device
    training = Training(recipe, simulated.device, built_in=built_in)
    simulated.watch(training.model, inputs=training.inputs)
    return training


@contextlib.contextmanager
def gc_frozen():
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
