"""The widths of a model's config: its own, and the chosen ones at which a structure is recorded.

Models of one family do the same at any width, so a trace is recorded once. The chosen widths have
prime factors that can be read back from the bytes of a tensor (`memlab.trace.symbols`).
"""

import functools
import re
from typing import Any

from memlab import models
from memlab.libraries import remembered
from memlab.models import Model

# The chosen widths. g: key-value heads. m: query heads per key-value head. d: size of a head.
# h: hidden size, if it is not g * m * d. f: feed-forward width. V: vocabulary.
# Each width has a prime factor of its own, by which it is recognized in a number of bytes.
# The rest, a power of two, is the multiple to which kernels round the width up. It also makes the
# blocks of bitsandbytes whole. A vector with 8-bit states is a multiple of 256 elements, the block
# of such states. A matrix in 4 bits is a multiple of 64 * 256 elements: 64 share a scale, and 256
# scales share a scale of scales.
WIDTHS = {"g": 13 * 8, "m": 19, "d": 5 * 32, "h": 31 * 128, "f": 53 * 256, "V": 41 * 64}
HEAD_SIZES = ("head_dim", "d_kv")  # fields of a config that name the size of a head
# Fields that are the hidden size, unless embeddings are projected to it.
EMBEDDING_SIZES = ("embedding_size", "word_embed_proj_dim")
LENGTHS = ("max_position_embeddings", "sliding_window")  # fields that are sizes in any structure
ONE_PROJECTION = ("phi3",)  # families with one weight for queries, keys and values
# Other widths, and a LoRA rank, for a run that checks a trace with 8-bit states. bitsandbytes keeps
# the states of small tensors in 32 bits. At one of these widths the same tensors may be small as at
# `WIDTHS` (`memlab.predict.structure.with_matching_state_dtypes`).
LIKE_WIDTHS = (
    {"g": 8, "m": 3, "d": 128, "h": 3072, "f": 8192, "V": 32000},
    {"g": 64, "m": 1, "d": 128, "h": 8192, "f": 16384, "V": 32000},
    {"g": 64, "m": 8, "d": 256, "h": 3072, "f": 8192, "V": 32000},
)
LIKE_RANK = 256


# The first layers of a model, among which every kind of layer occurs. Kinds that a list in the
# config names are looked up there and may come later.
LAYERS = 16


@remembered
def shapes_of(model: Model, task: str) -> list[list[int]]:
    """The shapes of a model's weights outside its layers, and in one layer of each kind.

    Layers of one kind have the same shapes. A kind may first occur late in a model. In Qwen3-Next
    every fourth layer has full attention, in Jamba every eighth.
    """
    config = models.config(model)
    listed = list(zip(*models.by_layer(config).values(), strict=True))  # the kind of each layer
    # As many layers as include the first of each kind.
    first = [LAYERS, *(listed.index(kind) + 1 for kind in listed)]
    layers = min(max(first), config.num_hidden_layers)
    built = models.skeleton(models.with_layers(config, layers), task)
    around: list[tuple[int, ...]] = []
    layers_weights: dict[str, list[tuple[int, ...]]] = {}
    for name, weight in built.named_parameters():
        # `model.layers.3.mlp.up_proj.weight` belongs to the layer `model.layers.3.`.
        layer = re.match(r"(.*?\.\d+\.)(.*)", name)
        shapes_of_layer = layers_weights.setdefault(layer[1], []) if layer else around
        shapes_of_layer.append(tuple(weight.shape))
    kinds = dict.fromkeys(map(tuple, layers_weights.values()))
    shapes = [*around, *(shape for kind in kinds for shape in kind)]
    return [list(shape) for shape in shapes]


def size_field_names(config: Any) -> list[str]:
    """The config's own names of its positions and its window, which are sizes in any structure."""
    return [config.attribute_map.get(name, name) for name in LENGTHS]


def at_widths(config: Any, chosen: dict[str, int]) -> tuple[dict, dict[str, int], dict[str, int]]:
    """A config's fields at the chosen widths, and both widths of each symbol.

    Returns (field -> value at the chosen widths, symbol -> the config's own width, symbol -> the
    chosen width). m is 1 if every query head has its own keys. It is the config's own if one
    weight projects queries, keys and values. h is g * m * d if the config has no head size.
    """
    get = functools.partial(getattr, config)
    heads = config.num_attention_heads
    groups = get("num_key_value_heads", None) or heads
    size = next((get(name) for name in HEAD_SIZES if get(name, None)), None)
    own = {"V": config.vocab_size, "g": groups, "m": heads // groups, "h": config.hidden_size}
    own["d"] = size or config.hidden_size // heads
    new = dict(chosen)
    # One weight for queries, keys and values has g * (m + 2) * d rows. m + 2 is no product of
    # symbols, so m must stay as it is.
    if groups == heads or config.model_type in ONE_PROJECTION:
        new["m"] = own["m"]
    if size is None:
        new["h"] = new["g"] * new["m"] * new["d"]
    values = {
        "vocab_size": new["V"],
        "hidden_size": new["h"],
        "pooler_hidden_size": new["h"],
        **dict.fromkeys(EMBEDDING_SIZES, new["h"]),
        "num_attention_heads": new["g"] * new["m"],
        "num_key_value_heads": new["g"],
    }
    values |= dict.fromkeys(HEAD_SIZES, new["d"])
    for name in models.WIDTHS:
        if get(name, None):
            own["f"], values[name] = get(name), new["f"]
    return values, own, new


def heads_of_a_key(config: Any) -> int:
    """The number of query heads that share one key-value head."""
    heads = config.num_attention_heads
    return heads // (getattr(config, "num_key_value_heads", None) or heads)
