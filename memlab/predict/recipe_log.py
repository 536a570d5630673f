"""What is derived from a recipe, rather than logged, when its footprint is predicted.

That is: the number formats that a GPU refuses, how often each micro-batch counts, the assumptions
to report, and the warm-up block of `from_pretrained`. The module imports no PyTorch, so that an
answer from a stored trace does not need it.
"""

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from memlab import models
from memlab.gpus import GPU, require_native
from memlab.libraries import remembered
from memlab.models import Model
from memlab.spec.recipe import FOUR_BITS, QUANTIZED, Recipe
from memlab.spec.serving import Serving, Workload
from memlab.trace.log import Log
from memlab.trace.work import drop_small_ops, repeat_micro_batch
from memlab.units import gib

# Bytes of the GPU that transformers' warm-up leaves free ("max device memory - 1.2 GiB" in
# `caching_allocator_warmup`, modeling_utils.py).
LEFT_FREE = int(1.2 * 2**30)
# Up to this many layers, running the whole model is as quick as running shallow ones. Its log then
# keeps the layers apart by their numbers.
MAX_LAYERS_TO_RUN = 12
# Elements. Smaller weights stay on the GPU: `minimal_size` of torchao's CPUOffloadOptimizer
# (torchao/optim/cpu_offload.py).
LEAST_OFFLOADED = 4096
# Families with activations above 65,504, the largest number of fp16: huggingface/transformers#9295
# (T5), unslothai/unsloth#4014 (Gemma 3, whose reach 800,000).
OVERFLOWING = ("gemma3", "gemma3_text", "t5", "mt5")


def require_recipe(recipe: object) -> None:
    """Raise ValueError for anything but a recipe or a serving, such as the name of a model."""
    if not isinstance(recipe, (Recipe, Serving)):
        raise ValueError(f"recipe is {recipe!r}: allowed are a memlab.Recipe and a memlab.Serving")


def refuse_format(recipe: Workload, card: GPU) -> None:
    """Raise ValueError if a GPU has no kernels for the number formats or the attention."""
    require_recipe(recipe)
    for precision in (recipe.precision, recipe.compute_dtype or ""):
        require_native(precision, card.name, "bfloat16" in card.native_dtypes)
    if recipe.attention == "flash_attention_2" and card.capability < (8, 0):
        raise ValueError(
            f"attention is 'flash_attention_2': {card.name} has compute capability "
            f"{'{}.{}'.format(*card.capability)}, flash-attn needs 8.0; allowed are eager, sdpa"
        )


def is_deep(recipe: Workload) -> bool:
    """Whether a model has so many layers that shallow models are quicker to run."""
    return getattr(models.settings(recipe.model), "num_hidden_layers", 0) > MAX_LAYERS_TO_RUN


def unlike_micro_batches(recipe: Workload) -> int:
    """The number of micro-batches of a step that allocate or compute differently.

    The first one makes the gradients and the second one adds to them, as all later ones do. With
    several ranks the last one also reduces them.
    """
    return 2 if recipe.ranks == 1 else 3


def with_all_micro_batches(recipe: Workload, log: Log) -> Log:
    """The log with the work of every micro-batch counted, and with the recipe's assumptions."""
    # At most `unlike_micro_batches` ran, and every further one repeats the work of the second. The
    # memory events would repeat, too, so the log leaves them out and has only their tokens.
    times = max(1, recipe.accumulation - unlike_micro_batches(recipe) + 1)
    work = drop_small_ops(repeat_micro_batch(log.work, times))
    assumptions = *log.assumptions, *assumed(recipe), *left_on_host(recipe, log.weights)
    return replace(log, work=work, assumptions=assumptions)


def assumed(recipe: Workload) -> tuple[str, ...]:
    """Assumptions about a recipe that a user may not expect, one line of text each.

    They name the parts of a nested config that are left out, and optional packages whose kernels
    transformers would use if they were installed. They also name the weights that stay unquantized
    under a quantized base, if these are the larger part, and the dtype of those weights. And they
    name the families whose activations are known to overflow in fp16.
    """
    lines, parts = [], models.left_out(recipe.model)
    if parts:
        lines.append(f"only the text model, without {' and '.join(parts)}")
    if hasattr(models.settings(recipe.model), models.OF_DELTA_RULE):
        lines.append(
            "layers of linear attention run transformers' own code, as if the package "
            "flash-linear-attention were not installed"
        )
    if hasattr(models.settings(recipe.model), models.OF_SHORT_CONVOLUTIONS):
        lines.append(
            "short convolutions run transformers' own code, as if the package causal-conv1d were "
            "not installed"
        )
    formats = recipe.precision, recipe.compute_dtype
    if models.settings(recipe.model).model_type in OVERFLOWING and {"fp16", "fp16-amp"} & {
        *formats
    }:
        lines.append(
            "fp16's range suffices; activations of this family are known to exceed it, and a loss "
            "is then NaN, which bf16 and fp32 avoid"
        )
    if recipe.base in QUANTIZED:
        reached, elements = numbers_of(recipe.model, recipe.task)
        if reached < elements / 2:
            lines.append(
                f"{recipe.base} quantizes {reached / elements:.1%} of the weights: what is not in "
                "a plain linear layer, such as experts and embeddings, stays unquantized"
            )
        if isinstance(recipe, Recipe) and recipe.compute_dtype != "fp32":
            lines.append(UPCAST if recipe.upcast else NOT_UPCAST)
    return tuple(lines)


# peft's `prepare_model_for_kbit_training` casts every weight that is not quantized. TRL's trainers
# called it until October 2025, cast only the norms until December 2025, and cast nothing since.
UPCAST = (
    "the rest of a quantized base (norms, embeddings, head) is cast to fp32, as by peft's "
    "prepare_model_for_kbit_training; TRL, since December 2025, leaves it in 16 bits (--no-upcast)"
)
NOT_UPCAST = (
    "the rest of a quantized base (norms, embeddings, head) stays in 16 bits, as TRL leaves it "
    "since December 2025; peft's prepare_model_for_kbit_training casts it to fp32, which needs more"
)


def warm_up_bytes(recipe: Workload, total: int | None = None) -> int:
    """Bytes of the block that `from_pretrained` allocates and frees before it loads a base.

    total: bytes of the GPU, None for no limit. The block leaves `LEFT_FREE` bytes free.

    The block has the size of all weights: `caching_allocator_warmup` and `get_total_byte_count` in
    transformers' modeling_utils.py. Like transformers, it leaves out the scales of a quantized
    base. Weights that transformers keeps in fp32 count as if they had the compute dtype.
    """
    # 4 bits or 1 byte per quantized weight; 4 or 2 bytes for each of the rest.
    reached, elements = numbers_of(recipe.model, recipe.task)
    nbytes = reached // 2 if recipe.base in FOUR_BITS else reached
    nbytes += (elements - reached) * (4 if recipe.compute_dtype == "fp32" else 2)
    return nbytes if total is None else max(0, min(nbytes, total - LEFT_FREE))


@remembered
def numbers_of(model: Model, task: str | None) -> list[int]:
    """[elements of a model's weights that a quantized base quantizes, all its elements]."""
    from memlab.workloads.quantized import to_be_quantized

    built = models.skeleton(model, task)
    reached = sum(module.weight.numel() for module in to_be_quantized(built).values())
    return [reached, sum(parameter.numel() for parameter in built.parameters())]


def gradient_bytes(recipe: Workload) -> int:
    """Bytes per element of a gradient."""
    in_fp32 = recipe.lora_rank and recipe.lora_fp32
    return 2 if recipe.precision in ("bf16", "fp16") and not in_fp32 else 4


def left_on_host(recipe: Workload, weights: Counter) -> tuple[str, ...]:
    """What an offloaded optimizer holds and computes on the host, in one line; else nothing.

    weights: (elements, trainable) -> the number of such parameters.
    """
    if recipe.optimizer_offload == "none":
        return ()
    large = sum(n * times for (n, free), times in weights.items() if free and n >= LEAST_OFFLOADED)
    # Four numbers per element on the host: the weight, its gradient and AdamW's two states, all in
    # the dtype of the weight (`torch.empty_like` in torchao/optim/cpu_offload.py).
    held = 4 * large * gradient_bytes(recipe)
    return (
        f"the host holds {gib(held)} of weights, gradients and AdamW's states; the time of its "
        "step is not estimated",
    )


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Exempt all objects that exist now, mostly the libraries', from garbage collection.

    The libraries have a million objects. A run makes and drops millions more, so the collector
    would scan them again and again, which takes up to a third of the time.
    """
    if gc.get_freeze_count():  # an outer block has frozen them
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
