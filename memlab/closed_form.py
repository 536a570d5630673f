"""The memory of a training step in closed form: sums of products of a model's dimensions.

Every tensor of a training step has a size like 4 * b * s * f bytes. `derive` finds these products
for a family of models and a way of training: it lets `memlab.simulate` run a model whose
dimensions are distinct primes (times powers of two), so that each storage's bytes can be factored
back into dimensions, with two, three and four layers, which says what each further layer adds. What
is kept are the moments at which the peak can be, each a list of tensors. Nothing is fitted.

The coefficients (memlab/data/coefficients.json) are plain JSON: `cases` by key, each with `tensors`
as [category, coefficient, {symbol: power}] (sizes in bytes) and `moments` with their phase and
`counts` as [tensor, how many in a model of three layers, how many more with each further layer].
"""

import functools
import json
import math
from pathlib import Path

import numpy as np

from memlab import models
from memlab.footprint import Category, Footprint, Phase
from memlab.gpus import GPU, find_gpu
from memlab.recipe import Recipe
from memlab.trace import depth
from memlab.trace.allocator import (
    LARGE_ROUND,
    MEDIUM_REQUEST,
    MEDIUM_SEGMENT,
    MIN_BLOCK,
    SMALL_REQUEST,
    SMALL_SEGMENT,
)

# Symbol: (prime, multiplier). b sequences of s tokens; g key-value heads with m query heads each,
# of size d; h hidden size where it is not g * m * d; f feed-forward width; V vocabulary; P
# positions; r LoRA rank. The multipliers are what kernels round a dimension up to.
SYMBOLS = {
    "b": (13, 1),
    "s": (37, 64),
    "g": (17, 1),
    "m": (19, 1),
    "d": (29, 8),
    "h": (31, 16),
    "f": (53, 16),
    "V": (41, 64),
    "P": (43, 64),
    "r": (47, 1),
}
PRIMED = {name: prime * times for name, (prime, times) in SYMBOLS.items()}
HEAD_SIZES = ("head_dim", "d_kv")
FILE = Path(__file__).parent / "data" / "coefficients.json"


def formula(recipe: Recipe, gpu: GPU | str | int | None = None) -> Footprint:
    """The footprint of one optimizer step of `recipe`, by arithmetic alone, without a timeline.

    gpu: as for `simulate`; it decides the size of the workspaces and the context.

    Domain: models of at least 2 equal layers (in an encoder-decoder as many in both), frozen as a
    whole or not at all, without 4-bit or 8-bit numbers and without clipping, trained in a way for
    which coefficients were derived. Sizes are free.
    Tensors are exact, each in the block that the allocator would give it in a fresh segment; what a
    reused block has over is not in it. No out-of-memory error: compare with `gpu.usable` yourself.

    What is reserved is a matter of order, which sums do not have, and a replay of the order takes
    a thousand times as long. So peak_reserved and device_used are None, and `reserved_range`
    holds, in bytes, peak_allocated, below which no allocator can be, and what would be reserved
    if no block were ever used again for another size. The upper end is usual and no bound: a
    block that a smaller tensor has split asks for one more, and of the moments of a step only
    those are known at which a peak can be. benchmarks/formula.py counts how often it holds.

    Raises ValueError outside the domain and where there are no coefficients; `derive` makes them.
    """
    card = find_gpu(gpu)
    case, dimensions, layers = _read(recipe)
    if case not in coefficients():
        raise ValueError(
            f"no coefficients for {recipe}: memlab.derive(recipe) makes them in seconds"
        )
    return _evaluate(tables(case), dimensions | {"W": card.workspace}, layers, card)


@functools.cache
def tables(key: str):
    """A case with its moments as arrays: rows are moments, columns tensors."""
    case = coefficients()[key]
    once, each = np.zeros((2, len(case["moments"]), len(case["tensors"])))
    for row, moment in enumerate(case["moments"]):
        for column, first, more in moment["counts"]:
            once[row, column], each[row, column] = first, more
    return case, once, each


def _evaluate(case_tables, dimensions: dict[str, int], layers: int, card) -> Footprint:
    case, once, each = case_tables
    more = layers - depth.SHALLOW[1]
    sizes = [product(term, dimensions) for term in case["tensors"]]
    blocks = np.array([_block(nbytes) for nbytes in sizes])
    counts = once + more * each
    allocated = counts @ blocks
    worst = int(allocated.argmax())
    peak = int(allocated[worst])
    breakdown = dict.fromkeys(Category, 0)
    for (category, *_), size, count in zip(case["tensors"], sizes, counts[worst], strict=True):
        breakdown[Category(category)] += round(count * size)
    breakdown[Category.ROUNDING] = peak - sum(breakdown.values())
    numbers = {
        name: sum(
            (first + more * extra) * round(product(term, dimensions))
            for term, first, extra in case[name]
        )
        for name in ("parameters", "trainable_parameters")
    }
    return Footprint(
        peak_allocated=peak,
        peak_reserved=None,
        reserved_range=(peak, max(peak, _without_reuse(blocks, counts))),
        breakdown=breakdown,
        peak_phase=Phase(case["moments"][worst]["phase"]),
        context=card.context,
        **numbers,
    )


def _without_reuse(blocks, counts) -> int:
    """Bytes of the segments if every size of block had its own: the most of each, summed up."""
    sizes, which = np.unique(blocks, return_inverse=True)
    of_each = counts @ (which[:, None] == np.arange(len(sizes)))
    held = of_each.max(axis=0)
    small, large = sizes <= SMALL_REQUEST, sizes >= MEDIUM_REQUEST
    reserved = 0
    for sizes_of_pool, segment in (
        (sizes * small, SMALL_SEGMENT),
        (sizes * (~small & ~large), MEDIUM_SEGMENT),
        (_up(sizes, LARGE_ROUND) * large, LARGE_ROUND),
    ):
        reserved += _up(int(held @ sizes_of_pool), segment)
    return reserved


def _block(nbytes: float) -> int:
    """The allocator's block for a tensor; in a segment of its own, a rest up to 1 MiB included."""
    block = _up(math.ceil(nbytes), MIN_BLOCK)
    segment = _up(block, LARGE_ROUND)
    return segment if block >= MEDIUM_REQUEST and segment - block <= SMALL_REQUEST else block


def _up(nbytes, unit):
    return -(-nbytes // unit) * unit


def product(term, dimensions) -> float:
    """Bytes of a tensor; a dimension's power times a coefficient with a power of 2 below."""
    _, value, powers = term
    for symbol, power in powers.items():
        value *= dimensions[symbol] ** power
    return value


@functools.cache
def coefficients() -> dict[str, dict]:
    """Every case that is known, by its key; `derive` adds to it."""
    return json.loads(FILE.read_text(encoding="utf-8"))["cases"] if FILE.exists() else {}


# ---------------------------------------------------------------------- what a recipe says


def key(recipe: Recipe) -> str:
    """Which case of the coefficients a recipe needs. Raises ValueError outside the domain."""
    return _read(recipe)[0]


def _read(recipe: Recipe) -> tuple[str, dict[str, int], int]:
    """The key of a recipe's case, its dimensions and its number of layers."""
    if not set(recipe.freeze) <= {"embeddings", "backbone"}:
        raise ValueError(
            f"freeze holds {', '.join(map(str, recipe.freeze))}: the formula allows embeddings and "
            "backbone"
        )
    if recipe.base != "none" or recipe.optimizer.endswith("8bit"):
        raise ValueError(
            f"base is {recipe.base!r}, optimizer {recipe.optimizer!r}: the formula allows neither "
            "quantized bases nor 8-bit optimizers, whose blocks make sizes that are no products"
        )
    if recipe.max_grad_norm:
        raise ValueError(
            f"max_grad_norm is {recipe.max_grad_norm!r}: the formula allows 0, because clipping "
            "lays the norms of all weights side by side, and their number is no dimension"
        )
    named = isinstance(recipe.model, str) and recipe.model in models.MODELS
    structure, dimensions, layers = (_named if named else _structure)(recipe.model)
    way = {
        "task": recipe.task,
        "precision": recipe.precision,
        "optimizer": recipe.optimizer,
        "checkpointing": recipe.checkpointing,
        "attention": recipe.attention,
        "accumulated": recipe.accumulation > 1,
        "set_to_none": recipe.set_to_none,
        "freeze": sorted(recipe.freeze),
    }
    if recipe.padded:
        way["padded"] = True
    if recipe.lora_rank:
        targets = recipe.lora_targets
        way["lora"] = [
            targets if isinstance(targets, str) else sorted(targets),
            recipe.lora_dropout > 0,
            recipe.lora_fp32,
        ]
    case = f"{structure} {json.dumps(way, sort_keys=True)}"
    sizes = {"b": recipe.batch_size, "s": recipe.seq_len, "r": recipe.lora_rank}
    return case, dimensions | sizes, layers


@functools.cache
def _named(model: str):
    return _structure(model)


def _structure(model) -> tuple[str, dict[str, int], int]:
    """What is special about a config apart from sizes, as a text; its dimensions; its layers."""
    config = models.config(model)
    layers = config.num_hidden_layers
    if layers < 2 or (getattr(config, "num_decoder_layers", None) or layers) != layers:
        raise ValueError(
            f"{config.model_type} with {layers} layers: the formula allows models of at least 2 "
            "layers, in a decoder as many as in the encoder"
        )
    prime, dimensions = primed(config)
    kept = {}
    for name, value in vars(prime).items():
        if isinstance(value, (list, tuple)) and value and len(set(map(str, value))) == 1:
            value = value[0]  # a kind of layer, named for each of them
        if isinstance(value, float):
            value = bool(value) if "drop" in name else None
        if isinstance(value, dict):
            value = value.get("rope_type")
        hidden = name.startswith("_") or name.endswith("token_id")
        hidden |= "layers" in name or name == "n_layer"
        if not hidden and isinstance(value, (bool, int, str)):
            kept[name] = value
    kept |= {"model_type": config.model_type}
    return json.dumps(kept, sort_keys=True), dimensions, layers


def primed(config):
    """The config with dimensions that are distinct primes, and its real dimensions."""
    get = functools.partial(getattr, config)
    heads = config.num_attention_heads
    groups = get("num_key_value_heads", None) or heads
    size = next((get(name) for name in HEAD_SIZES if get(name, None)), None)
    real = {"V": config.vocab_size, "g": groups, "m": heads // groups, "h": config.hidden_size}
    real["d"] = size or config.hidden_size // heads
    new = dict(PRIMED)
    if groups == heads:
        new["m"] = 1
    if size is None:
        new["h"] = new["g"] * new["m"] * new["d"]
    values = {
        "vocab_size": new["V"],
        "hidden_size": new["h"],
        "pooler_hidden_size": new["h"],
        "embedding_size": new["h"],
        "num_attention_heads": new["g"] * new["m"],
        "num_key_value_heads": new["g"],
    }
    values |= dict.fromkeys(HEAD_SIZES, new["d"])
    for name in models.WIDTHS:
        if get(name, None):
            real["f"], values[name] = get(name), new["f"]
    if get("max_position_embeddings", None):
        real["P"], values["max_position_embeddings"] = config.max_position_embeddings, new["P"]
    return models.resized(config, **values), real
