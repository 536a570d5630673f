"""The widths of a model's config: those at which a structure is recorded, and a config's own."""

import functools
import re
from typing import Any

from memlab import models
from memlab.libraries import remembered
from memlab.models import Model

# Chosen widths: g key-value heads with m query heads each, of size d; h hidden size where it is not
# g * m * d; f feed-forward width; V vocabulary. Each has a prime factor of its own; the rest, a
# power of two, is what kernels round it up to. It makes every vector with states in 8 bits whole
# blocks of 256, and every matrix a multiple of the 64 * 256 weights that share a scale of scales
# in 4 bits.
WIDTHS = {"g": 13 * 8, "m": 19, "d": 5 * 32, "h": 31 * 128, "f": 53 * 256, "V": 41 * 64}
HEAD_SIZES = ("head_dim", "d_kv")
# Where these are not the hidden size, embeddings are projected to it.
EMBEDDING_SIZES = ("embedding_size", "word_embed_proj_dim")
LENGTHS = ("max_position_embeddings", "sliding_window")  # sizes of any structure
ONE_PROJECTION = ("phi3",)  # families with a weight for queries, keys and values together
# Other widths, and a rank, at which states in 8 bits may be of the same weights as at those.
LIKE_WIDTHS = (
    {"g": 8, "m": 3, "d": 128, "h": 3072, "f": 8192, "V": 32000},
    {"g": 64, "m": 1, "d": 128, "h": 8192, "f": 16384, "V": 32000},
    {"g": 64, "m": 8, "d": 256, "h": 3072, "f": 8192, "V": 32000},
)
LIKE_RANK = 256


LAYERS = 16  # at the front, among which are layers of all kinds, where no list says which are


@remembered
def shapes_of(model: Model, task: str) -> list[list[int]]:
    """The shapes of a model's weights, of one layer of each kind.

    A layer of another kind has other shapes. It may come late: every fourth of Qwen3-Next is one of
    full attention, and every eighth of Jamba.
    """
    config = models.config(model)
    listed = list(zip(*models.by_layer(config).values(), strict=True))
    first = [LAYERS, *(listed.index(kind) + 1 for kind in listed)]
    layers = min(max(first), config.num_hidden_layers)
    built = models.skeleton(models.with_layers(config, layers), task)
    around: list[tuple[int, ...]] = []
    layers_weights: dict[str, list[tuple[int, ...]]] = {}
    for name, weight in built.named_parameters():
        layer = re.match(r"(.*?\.\d+\.)(.*)", name)
        shapes_of_layer = layers_weights.setdefault(layer[1], []) if layer else around
        shapes_of_layer.append(tuple(weight.shape))
    kinds = dict.fromkeys(map(tuple, layers_weights.values()))
    shapes = [*around, *(shape for kind in kinds for shape in kind)]
    return [list(shape) for shape in shapes]


def size_field_names(config: Any) -> list[str]:
    """The fields of a config that are sizes of any structure: its positions and its window."""
    return [config.attribute_map.get(name, name) for name in LENGTHS]


def at_widths(config: Any, chosen: dict[str, int]) -> tuple[dict, dict[str, int], dict[str, int]]:
    """(what a config with these widths has, symbol -> its own width, symbol -> the chosen one).

    m is 1 where each head has keys of its own, and the config's where queries, keys and values come
    of one weight; h is g * m * d where heads have no size.
    """
    get = functools.partial(getattr, config)
    heads = config.num_attention_heads
    groups = get("num_key_value_heads", None) or heads
    size = next((get(name) for name in HEAD_SIZES if get(name, None)), None)
    own = {"V": config.vocab_size, "g": groups, "m": heads // groups, "h": config.hidden_size}
    own["d"] = size or config.hidden_size // heads
    new = dict(chosen)
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
    """Query heads that share a head of keys and values."""
    heads = config.num_attention_heads
    return heads // (getattr(config, "num_key_value_heads", None) or heads)
