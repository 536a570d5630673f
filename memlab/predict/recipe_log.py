"""What stands between a recipe and the log of its runs, or of its trace, and needs no PyTorch.

Which formats a card refuses, how often a step's micro-batches count, and what is assumed.
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

LEFT_FREE = int(1.2 * 2**30)  # bytes of a card that the warm-up leaves
# Up to so many layers the model itself is as quick, and its log tells layers apart.
MAX_LAYERS_TO_RUN = 12
LEAST_OFFLOADED = 4096  # elements of a weight that torchao's CPUOffloadOptimizer moves to the host


def require_recipe(recipe: object) -> None:
    """Raise ValueError for what is none, such as the name of a model."""
    if not isinstance(recipe, (Recipe, Serving)):
        raise ValueError(f"recipe is {recipe!r}: allowed are a memlab.Recipe and a memlab.Serving")


def refuse_format(recipe: Workload, card: GPU) -> None:
    """Raise ValueError where a card has no kernels for a number format, or an attention."""
    require_recipe(recipe)
    for precision in (recipe.precision, recipe.compute_dtype or ""):
        require_native(precision, card.name, "bfloat16" in card.native_dtypes)
    if recipe.attention == "flash_attention_2" and card.capability < (8, 0):
        raise ValueError(
            f"attention is 'flash_attention_2': {card.name} has compute capability "
            f"{'{}.{}'.format(*card.capability)}, flash-attn needs 8.0; allowed are eager, sdpa"
        )


def is_deep(recipe: Workload) -> bool:
    """Whether a model has so many layers that shallow ones are quicker to run."""
    return getattr(models.settings(recipe.model), "num_hidden_layers", 0) > MAX_LAYERS_TO_RUN


def unlike_micro_batches(recipe: Workload) -> int:
    """How many micro-batches of a step differ: the first makes gradients, the second adds to them.

    Of several ranks the last reduces them, too.
    """
    return 2 if recipe.ranks == 1 else 3


def with_all_micro_batches(recipe: Workload, log: Log) -> Log:
    """The log with the work of all micro-batches that counts, and what is assumed of a recipe."""
    # Of more micro-batches some ran; the others do what the second did.
    times = max(1, recipe.accumulation - unlike_micro_batches(recipe) + 1)
    work = drop_small_ops(repeat_micro_batch(log.work, times))
    assumptions = *log.assumptions, *assumed(recipe), *left_on_host(recipe, log.weights)
    return replace(log, work=work, assumptions=assumptions)


def assumed(recipe: Workload) -> tuple[str, ...]:
    """What a recipe's figures leave out or leave as it is, and a reader may not expect.

    The parts of a nested config, kernels of a package that transformers takes where it is there,
    and the weights that a quantized base does not reach, where they are the larger part.
    """
    lines, parts = [], models.left_out(recipe.model)
    if parts:
        lines.append(f"the text model alone, without {' and '.join(parts)}")
    if hasattr(models.settings(recipe.model), models.OF_DELTA_RULE):
        lines.append(
            "layers of linear attention run transformers' own code, as where the package "
            "flash-linear-attention is not installed"
        )
    if hasattr(models.settings(recipe.model), models.OF_SHORT_CONVOLUTIONS):
        lines.append(
            "short convolutions run transformers' own code, as where the package causal-conv1d is "
            "not installed"
        )
    if recipe.base in QUANTIZED:
        reached, elements = numbers_of(recipe.model, recipe.task)
        if reached < elements / 2:
            lines.append(
                f"{recipe.base} reaches {reached / elements:.1%} of the weights: what is no plain "
                "linear layer, such as experts and embeddings, stays unquantized"
            )
        if isinstance(recipe, Recipe) and recipe.compute_dtype != "fp32":
            lines.append(UPCAST if recipe.upcast else NOT_UPCAST)
    return tuple(lines)


# PEFT casts all that is not quantized. TRL's trainers called it until October 2025, cast norms
# alone until December 2025, and nothing since.
UPCAST = (
    "the rest of a quantized base (norms, embeddings, head) is cast to fp32, as by peft's "
    "prepare_model_for_kbit_training; TRL, since December 2025, leaves it in 16 bits (--no-upcast)"
)
NOT_UPCAST = (
    "the rest of a quantized base (norms, embeddings, head) stays in 16 bits, as TRL leaves it "
    "since December 2025; peft's prepare_model_for_kbit_training casts it to fp32, which needs more"
)


def warm_up_bytes(recipe: Workload, total: int | None = None) -> int:
    """Bytes of the block that `from_pretrained` takes and frees before it loads a base.

    Those of all weights, without scales, and of what stays in fp32 as if it were not:
    `caching_allocator_warmup` in transformers' modeling_utils.py. total: the card's bytes, of which
    some stay free; None for no limit.
    """
    reached, elements = numbers_of(recipe.model, recipe.task)
    nbytes = reached // 2 if recipe.base in FOUR_BITS else reached
    nbytes += (elements - reached) * (4 if recipe.compute_dtype == "fp32" else 2)
    return nbytes if total is None else max(0, min(nbytes, total - LEFT_FREE))


@remembered
def numbers_of(model: Model, task: str | None) -> list[int]:
    """How many numbers of a model's weights a base quantizes, and how many there are."""
    from memlab.workloads.quantized import to_be_quantized

    built = models.skeleton(model, task)
    reached = sum(module.weight.numel() for module in to_be_quantized(built).values())
    return [reached, sum(parameter.numel() for parameter in built.parameters())]


def gradient_bytes(recipe: Workload) -> int:
    """Bytes per number of a gradient."""
    in_fp32 = recipe.lora_rank and recipe.lora_fp32
    return 2 if recipe.precision in ("bf16", "fp16") and not in_fp32 else 4


def left_on_host(recipe: Workload, weights: Counter) -> tuple[str, ...]:
    """What an optimizer on the host keeps and does there, in a line; nothing for another.

    weights: how many parameters there are of (so many elements, trainable or not).
    """
    if recipe.optimizer_offload == "none":
        return ()
    large = sum(n * times for (n, free), times in weights.items() if free and n >= LEAST_OFFLOADED)
    held = 4 * large * gradient_bytes(recipe)
    return (
        f"the host holds {gib(held)} of weights, gradients and AdamW's states, its own step takes "
        "time that is not estimated",
    )


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
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
