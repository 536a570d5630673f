"""Runs of a recipe on a card that need not be there, at its own sizes and depth."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.gpus import ANY_CARD, GPU
from memlab.predict.progress import Progress
from memlab.predict.recipe_log import unlike_micro_batches
from memlab.spec.recipe import QUANTIZED, Recipe, is_moved_by_sharding
from memlab.spec.serving import Workload
from memlab.trace.events import Marker
from memlab.trace.log import Log
from memlab.trace.quantized_weights import numel
from memlab.trace.work import NORMS, drop_small_ops
from memlab.workloads.training import Training, import_libraries

Loop = Callable[[Recipe, SimulatedGPU], Training]


def log_of(
    recipe: Workload,
    gpu: GPU = ANY_CARD,
    numbered: bool = False,
    loop: Loop | None = None,
    most: int | None = None,
) -> Log:
    """What `recipe` does to memory, at its own depth, on a card like `gpu` without a limit.

    numbered: whether the log tells layers apart. loop: as in `full_log`. most: births and deaths,
    beyond which it ends with a ValueError.
    """
    import_libraries(recipe)
    if not isinstance(recipe, Recipe):
        from memlab.predict.serving import log_of_serving

        return log_of_serving(recipe, gpu, numbered)
    with _one_thread(), OwnLoop(gpu.without_limit(), ranks=recipe.ranks) as simulated:
        simulated.tracer.most = most
        training = _run(loop or two_steps, recipe, simulated)
        weights = weights_of(training.model)
        return Log.of(simulated.tracer, weights, numbered, simulated.work.of_step)


def shallow_log(
    recipe: Workload,
    gpu: GPU,
    loop: Loop | None = None,
    most: int | None = None,
) -> Log:
    """`log_of`, for comparing depths: without the bytes of norms, which grow with each layer."""
    log = log_of(recipe, gpu, loop=loop, most=most)
    return replace(log, work=drop_small_ops(log.work, NORMS))


def weights_of(model: torch.nn.Module) -> Counter:
    """How many parameters there are of (so many elements, trainable or not)."""
    return Counter((numel(weight), weight.requires_grad) for weight in model.parameters())


@contextlib.contextmanager
def _silent_transformers() -> Iterator[None]:
    """Without its warnings, such as that flash-attn casts what autocast leaves in fp32."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _run(loop: Loop, recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """What a loop gives. Raises ValueError, in one line, for what its model or a library raises."""
    try:
        with _silent_transformers():
            return loop(recipe, simulated)
    except (LookupError, RuntimeError, TypeError, AttributeError, AssertionError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, models))
        theirs = (frame for frame in reversed(frames) if not frame.filename.startswith(ours))
        at = next(theirs, frames[-1])
        raise ValueError(
            f"{recipe.model_name} does not train so ({Path(at.filename).name}:{at.lineno}): "
            f"{models.one_line(error)}"
        ) from error


class OwnLoop(SimulatedGPU):
    """A card for loops whose recipe says which libraries they need: bitsandbytes takes a second.

    What they do on it is the same under any setting of the allocator, whose statistics nobody asks.
    """

    imports_bitsandbytes = reads_environment = keeps_statistics = False


def two_steps(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """Train two steps on a card that is entered, and count the second."""
    training = built(recipe, simulated)
    # The others repeat the bytes of the second; only the loss of each, a number of 512 bytes as an
    # allocator's block, would be added.
    held, training.batches = training.batches, training.batches[: unlike_micro_batches(recipe)]
    with Progress(range(2), f"simulating {recipe.model_name}") as steps:
        for _ in steps:
            simulated.reset_peak()
            losses = training.make_gradients()
            simulated.steps.begin_update()
            training.update()
            simulated.tracer.mark(Marker.UPDATED)
            del losses
    training.batches = held
    return training


def two_updates(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """Two updates by gradients that no pass has made: what they do is that of `two_steps`'.

    Of weights without a gradient in `two_steps`, and of several ranks, it is not.
    """
    training = built(recipe, simulated)
    training.scaler.scale(torch.zeros((), device=simulated.device))
    free = [weight for weight in training.model.parameters() if weight.requires_grad]
    for _ in range(2):
        simulated.reset_peak()
        for weight in free:  # one after the other, as at any depth
            torch.autograd.backward(weight, torch.empty_like(weight))
        simulated.steps.begin_update()
        training.update()
        simulated.tracer.mark(Marker.UPDATED)
    return training


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
def _one_thread() -> Iterator[None]:
    """Compute what has data in one thread: it is little, and the others wait for more by spinning.

    That takes a sixth more processor time, which a second process may want.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
