"""Run a recipe on a simulated GPU, at the recipe's own sizes, and return the log.

The training loops here are memlab's own. They run the real model code on fake tensors, twice, so
that the log holds a step in which the optimizer states exist already.
"""

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

Loop = Callable[[Recipe, SimulatedGPU], Training]  # a training loop, such as `two_steps`


def log_of(
    recipe: Workload,
    gpu: GPU = ANY_CARD,
    numbered: bool = False,
    loop: Loop | None = None,
    most: int | None = None,
) -> Log:
    """The log of a recipe at its own depth, on a GPU like `gpu` without a limit.

    numbered: whether the log keeps the numbers of layers.
    loop: the training loop, as in `full_log`.
    most: the most allocations and frees. Raises ValueError beyond them.

    Also raises ValueError if the recipe cannot be trained.
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
    """As `log_of`, for comparing models of several depths.

    Operators that move less than `NORMS` bytes count without their bytes. At every depth one
    operator stacks the norms of all gradients. Its bytes grow with the depth, so the work of two
    depths would not agree.
    """
    log = log_of(recipe, gpu, loop=loop, most=most)
    return replace(log, work=drop_small_ops(log.work, NORMS))


def weights_of(model: torch.nn.Module) -> Counter:
    """(elements, trainable) -> the number of such parameters of a model."""
    return Counter((numel(weight), weight.requires_grad) for weight in model.parameters())


@contextlib.contextmanager
def _silent_transformers() -> Iterator[None]:
    """Silence transformers' warnings, such as the one on flash-attn's casts under autocast."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _run(loop: Loop, recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """Run a loop. An error of the model or of a library becomes a ValueError of one line."""
    try:
        with _silent_transformers():
            return loop(recipe, simulated)
    except (LookupError, RuntimeError, TypeError, AttributeError, AssertionError) as error:
        # Name the innermost line outside PyTorch and memlab: mostly one of transformers or peft.
        frames = traceback.extract_tb(error.__traceback__)
        ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, models))
        theirs = (frame for frame in reversed(frames) if not frame.filename.startswith(ours))
        at = next(theirs, frames[-1])
        raise ValueError(
            f"{recipe.model_name} cannot be trained so ({Path(at.filename).name}:{at.lineno}): "
            f"{models.one_line(error)}"
        ) from error


class OwnLoop(SimulatedGPU):
    """A simulated GPU for memlab's own loops, without what only a user's script may need.

    A recipe says which libraries it needs, so bitsandbytes is not imported just in case, which
    would take a second. The log does not depend on the allocator's settings, and no loop asks for
    the allocator's statistics.
    """

    imports_bitsandbytes = reads_environment = keeps_statistics = False


def two_steps(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """Train two steps on an entered simulated GPU. The second one is measured."""
    training = built(recipe, simulated)
    # Further micro-batches would repeat the events of the second. Each would only add its loss, a
    # number in a block of 512 bytes.
    held, training.batches = training.batches, training.batches[: unlike_micro_batches(recipe)]
    with Progress(range(2), f"simulating {recipe.model_name}") as steps:
        for _ in steps:
            simulated.reset_peak()
            losses = training.make_gradients()
            # The marks separate the update from the passes, so that they can be traced apart.
            simulated.steps.begin_update()
            training.update()
            simulated.tracer.mark(Marker.UPDATED)
            del losses  # alive during the update, as in `Training.step`
    training.batches = held
    return training


def two_updates(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """Two optimizer steps on gradients that no forward or backward pass has computed.

    Their events are those of the updates of `two_steps`, and they take a fraction of the time.

    Known limitations: they differ for several ranks, and for models with weights that get no
    gradient in `two_steps`.
    """
    training = built(recipe, simulated)
    # The gradient scaler makes its state when it first scales a loss, and refuses to step without.
    training.scaler.scale(torch.zeros((), device=simulated.device))
    free = [weight for weight in training.model.parameters() if weight.requires_grad]
    for _ in range(2):
        simulated.reset_peak()
        # One backward call per weight: its events then repeat with the layers.
        for weight in free:
            torch.autograd.backward(weight, torch.empty_like(weight))
        simulated.steps.begin_update()
        training.update()
        simulated.tracer.mark(Marker.UPDATED)
    return training


def built(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    """A `Training` on an entered simulated GPU, watched by its tracer, before the first step."""
    # A quantized base is built on the host and quantized weight by weight on its way to the GPU. A
    # model that moves to the GPU in shards is built there, too.
    on_host = recipe.base in QUANTIZED or is_moved_by_sharding(recipe)
    built_in = None if on_host else simulated.device
    training = Training(recipe, simulated.device, built_in=built_in)
    simulated.watch(training.model, inputs=training.inputs)
    return training


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread: little is computed here, and idle threads wait by spinning.

    The spinning takes a sixth more CPU time, which another process may need.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
