"""The memory of a recipe's step on a card that need not be there."""

from __future__ import annotations

from dataclasses import replace

from tqdm.auto import tqdm

from memlab import models
from memlab.card.gpu import SimulatedGPU
from memlab.card.loading import reserved_range
from memlab.footprint import Footprint
from memlab.gpus import GPU, find_gpu
from memlab.quantized import import_bitsandbytes
from memlab.recipe import Recipe
from memlab.trace import depth
from memlab.training import Training, import_peft


def simulate(recipe: Recipe, gpu: GPU | str | int | None = None) -> Footprint:
    """The memory of one optimizer step of `recipe` on a GPU that need not be there.

    gpu: a name of `memlab.gpus.GPUS`, a number of bytes, or None for a card without a limit.

    Two steps run; the second is counted, because optimizer states appear in the first. Of a model
    with many equal layers only a few run, and `memlab.depth` writes the others into the log.

    A quantized base moves to the card weight by weight, as in `memlab.measure`; this decides
    peak_reserved, but not what is allocated. Loaded by `from_pretrained` it leaves another cache
    behind: `reserved_range` holds the lowest and the highest figure of the orders of loading
    that `memlab.loading` tries, which are a sample and no proven bound.

    Raises torch.OutOfMemoryError in PyTorch's own words when the card is too small, and ValueError
    when it does not have the recipe's number format, or for a mixture of experts in another
    format than bf16.
    """
    card = None if gpu is None else find_gpu(gpu)
    return serve(recipe, event_log(recipe, card), card)


def event_log(recipe: Recipe, card: GPU | None, loop=None) -> depth.Log:
    """What two steps of `recipe` do to memory on a card of this kind, whatever its size.

    loop: another training loop than memlab's own, a function like `two_steps`.
    """
    simulated = SimulatedGPU(card)
    simulated.require(recipe.precision)
    simulated.require(recipe.compute_dtype or "")
    half = recipe.precision == "bf16" and not (recipe.base != "none" and recipe.upcast)
    if models.has_experts(recipe.model) and not half:
        raise ValueError(
            f"precision is {recipe.precision!r}: a mixture of experts is simulated in bf16 only "
            "(with a base: upcast=False), for PyTorch gives torch._grouped_mm shapes in no other"
        )
    import_outside(recipe)
    log = depth.log_at_full_depth(recipe, lambda shallow: trace(shallow, card, loop=loop))
    return log or trace(recipe, card, numbered=True, loop=loop)


def serve(recipe: Recipe, log: depth.Log, card: GPU | None) -> Footprint:
    """The footprint of a recipe's log, served by this card's allocator."""
    footprint = SimulatedGPU(card).replay(log)
    if recipe.base == "none":
        return footprint
    room = (card.usable, card.total_memory) if card else (None, None)
    return replace(footprint, reserved_range=reserved_range(log, *room))


def trace(recipe: Recipe, gpu: GPU | None = None, numbered=False, loop=None) -> depth.Log:
    """What `recipe` does to memory, at its own depth, on a card like `gpu` without a limit.

    numbered: whether the log tells layers apart. loop: as in `event_log`.
    """
    import_outside(recipe)
    simulated = SimulatedGPU(gpu and replace(gpu, total_memory=2**60))
    tracer, emptied = simulated.tracer, []
    tracer.allocator.empty_cache = lambda: emptied.append(len(tracer.events))
    with simulated:
        training = (loop or two_steps)(recipe, simulated)
        return depth.Log.of(tracer, emptied, training, numbered)


def import_outside(recipe: Recipe) -> None:
    """Packages that make tensors when they are imported, which would count as the card's."""
    if recipe.optimizer.endswith("8bit") or recipe.base != "none":
        import_bitsandbytes(f"optimizer {recipe.optimizer}, base {recipe.base}")
    if recipe.lora_rank:
        import_peft()


def two_steps(recipe: Recipe, simulated: SimulatedGPU) -> Training:
    built_in = moved_in = None
    if recipe.base != "none":
        built_in, moved_in = simulated.tracer.unseen(), simulated.tracer.loading()
    training = Training(recipe, simulated.device, built_in=built_in, moved_in=moved_in)
    simulated.tracer.watch(training.model, inputs=training.inputs)
    # From the third micro-batch on, each repeats the bytes of the second; only its loss, a
    # number of 512 bytes as an allocator's block, would be added.
    held, training.batches = training.batches, training.batches[:2]
    for _ in tqdm(range(2), f"simulating {recipe.model_name}", leave=False, delay=2):
        simulated.reset_peak()
        training.step()
    training.batches = held
    return training
