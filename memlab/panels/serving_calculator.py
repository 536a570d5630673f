"""The calculator panel for inference: memory of text generation, by closed formulas in the page.

It covers decoders of GPT-2's and of Llama's kind with `sdpa` attention and a dynamic cache, up to
their sliding window. Known limitation: the formulas do not know what the allocator keeps in its
cache. The verdict "fits" therefore counts activations and KV cache twice, and weights in whole
segments.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from memlab import models
from memlab.book.colours import SERVING_COLOURS
from memlab.fields import one_of
from memlab.gpus import ANY_CARD, GPUS, find_gpu, require_native
from memlab.models import Model
from memlab.panels.calculator import RULES, card_values, family
from memlab.panels.panel import Panel
from memlab.spec.serving import Serving, head_shape
from memlab.trace.allocator import (
    LARGE_ROUND,
    MEDIUM_REQUEST,
    MEDIUM_SEGMENT,
    MIN_BLOCK,
    SMALL_REQUEST,
    SMALL_SEGMENT,
)
from memlab.units import round_up
from memlab.workloads.quantized import to_be_quantized

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "nf4": 2}  # per activation, by weight format
GATED = ("llama", "mistral", "qwen2")
TYPES = ("gpt2", *GATED)
NAMES = [
    name
    for name in models.MODELS
    if not name.endswith("-tiny") and models.config(name).model_type in TYPES
]
FIELDS = ("batch_size", "prompt", "new_tokens", "weights", "all_logits")
HELD = ("weights", "kv_cache", "activations", "logits", "workspaces")


class ServingCalculator(Panel):
    """Whether weights, KV cache and the rest fit a GPU, with the largest batch and longest prompt.

    Readers choose a model of the catalogue or paste a config.json. They choose a GPU of the
    catalogue or give a number of GiB.

    serving: the `Serving` that is shown first, of a named model.
    gpu: the GPU that is shown first.

    Raises ValueError for an unknown GPU, for a model outside GPT-2's and Llama's kind, and for a
    number format that the GPU does not have.
    """

    kind = "serving"
    still = "The calculator needs scripts. Without them, memlab serve on a command line says more."

    def __init__(self, serving: Serving | None = None, gpu: str = "T4"):
        self.serving = serving or Serving(
            "llama-3.1-8b", prompt=2048, new_tokens=256, weights="nf4"
        )
        self.card = find_gpu(gpu)
        one_of("model", self.serving.model, NAMES)
        one_of("gpu", self.card.name, GPUS)
        native = "bfloat16" in self.card.native_dtypes
        require_native(self.serving.compute_dtype, self.card.name, native)

    def data(self) -> dict:
        start = {name: getattr(self.serving, name) for name in FIELDS}
        usual = {field.name: field.default for field in dataclasses.fields(Serving)}
        return {
            "start": {"serve": self.serving.model, "gpu": self.card.name} | start,
            "defaults": {name: usual[name] for name in FIELDS},
            "models": {name: dataclasses.asdict(shape(name)) for name in NAMES},
            "bytes": BYTES,
            "families": {name: family(name) for name in TYPES},
            "widths": models.WIDTHS,
            # The last one (ANY_CARD) lends its rules to a GPU that is given as a number of GiB.
            "cards": [card_values(card) for card in (*GPUS.values(), ANY_CARD)],
            "held": HELD,
            "colours": [SERVING_COLOURS[name] for name in HELD],
            "rules": RULES,
        }


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that the formulas need.

    gated: whether the feed-forward layer is Llama's, with two widening products; else GPT-2's.
    groups: key-value heads.
    size: the size of a head.
    hidden, wide: the hidden size, and the width of the feed-forward layer.
    longest: the longest sequence in tokens; None without a limit.
    weights: format -> bytes of all weights, scales included.
    segments: format -> bytes of the allocator's segments that hold the weights and nothing else.
    """

    gated: bool
    layers: int
    heads: int
    groups: int
    size: int
    hidden: int
    wide: int
    vocabulary: int
    longest: int | None
    weights: dict[str, int]
    segments: dict[str, int]


def shape(model: Model) -> Shape:
    """The shape of a model, given as for a `Recipe`.

    Raises ValueError for an architecture that is not in `TYPES`.
    """
    config = models.config(model)
    if config.model_type not in TYPES:
        raise ValueError(f"model type is {config.model_type!r}: allowed are {', '.join(TYPES)}")
    groups, size = head_shape(config)
    wide = next((getattr(config, n) for n in models.WIDTHS if getattr(config, n, None)), None)
    # Beyond the sliding window the cache stops to grow, which the formulas do not know.
    ends = models.max_length(config), getattr(config, "sliding_window", None)
    tensors = _tensors(config)
    return Shape(
        gated=config.model_type in GATED,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        groups=groups,
        size=size,
        hidden=config.hidden_size,
        wide=wide or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        longest=min((end for end in ends if end), default=None),
        weights={name: sum(size * n for size, n in of.items()) for name, of in tensors.items()},
        segments={name: _segments(of) for name, of in tensors.items()},
    )


def _tensors(config: Any) -> dict[str, Counter]:
    """Format -> Counter of bytes per tensor: how many tensors of the weights have each size."""
    with torch.device("meta"):
        model = models.build(config)
    linear = [module.weight for module in to_be_quantized(model).values()]
    quantized = {id(weight) for weight in linear}
    plain = [weight.numel() for weight in model.parameters()]
    rest = [2 * w.numel() for w in model.parameters() if id(w) not in quantized]
    sizes = {name: Counter(n * BYTES[name] for n in plain) for name in ("fp32", "fp16", "bf16")}
    # int8 has one fp32 scale per output row. GPT-2's Conv1D stores its weights transposed.
    rows = [4 * weight.shape[config.model_type == "gpt2"] for weight in linear]
    sizes["int8"] = Counter(rest + [weight.numel() for weight in linear] + rows)
    sizes["nf4"] = Counter(rest + [size for weight in linear for size in _nf4(weight.numel())])
    return sizes


def _nf4(numbers: int) -> list[int]:
    """Bytes of the tensors of an NF4 weight with double quantization.

    In order: packed weights, 8-bit scales of the blocks, fp32 scales of these scales, two code
    tables in fp32 (16 entries for weights, 256 for scales), and the offset of the scales.
    """
    blocks = -(-numbers // 64)  # 64 weights share a scale; 256 scales share a scale of scales
    return [-(-numbers // 2), blocks, 4 * -(-blocks // 256), 4 * 16, 4 * 256, 4]


def _segments(tensors: dict[int, int]) -> int:
    """Bytes of the segments for these tensors if each size of tensor has its own segments.

    tensors: bytes -> number of tensors. The end of a 20 MiB segment stays empty if it is too small
    for one more tensor of the size.
    """
    small = medium = large = 0
    for size, number in tensors.items():
        block = round_up(size, MIN_BLOCK)
        if block <= SMALL_REQUEST:
            small += number * block
        elif block < MEDIUM_REQUEST:
            medium += MEDIUM_SEGMENT * -(-number // (MEDIUM_SEGMENT // block))
        else:
            large += number * round_up(block, LARGE_ROUND)
    return round_up(small, SMALL_SEGMENT) + medium + large
