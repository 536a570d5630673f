"""The memory of inference by arithmetic: what `memlab.simulate` says of a `Serving`, in no time.

For decoders of GPT-2's and of Llama's kind with `sdpa` attention and a dynamic cache, as far as
their sliding window. Each number of a term is a count of tensors that live at the worst moment, as
the simulated log has them; tests compare both. What the allocator keeps in its cache it leaves out.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from memlab import models
from memlab.card.kernels.sdpa import model_routes
from memlab.gpus import GPU, find_gpu, require_native
from memlab.predict.fit import MARGIN, limited, room
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

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "nf4": 2}  # of a number that is computed
MOVING = ("kv_cache", "activations", "logits")  # what is not the same at every moment
GATED = ("llama", "mistral", "qwen2")
TYPES = ("gpt2", *GATED)


@dataclass(frozen=True)
class Shape:
    """What the form needs to know of a model.

    gated: Llama's feed-forward layer, of two widened products, in place of GPT-2's. groups: heads
    of keys. size: of a head. wide: of the feed-forward layer. longest: tokens, None for no end.
    weights: format -> bytes, scales included. segments: format -> bytes of the allocator's segments
    that hold these weights and nothing else.
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


def shape(model) -> Shape:
    """The shape of a model, as of a `Recipe`; raises ValueError for another architecture."""
    config = models.config(model)
    if config.model_type not in TYPES:
        raise ValueError(f"model type is {config.model_type!r}: allowed are {', '.join(TYPES)}")
    groups, size = head_shape(config)
    wide = next((getattr(config, n) for n in models.WIDTHS if getattr(config, n, None)), None)
    ends = models.max_length(config), getattr(config, "sliding_window", None)
    one, two = (_tensors(models.with_layers(config, layers)) for layers in (1, 2))
    layers = config.num_hidden_layers
    tensors = {
        name: {
            size: one[name][size] + (layers - 1) * (n - one[name][size]) for size, n in of.items()
        }
        for name, of in two.items()
    }
    return Shape(
        gated=config.model_type in GATED,
        layers=layers,
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


def _tensors(config) -> dict[str, Counter]:
    """Format -> how many of a model's weights, and of what belongs to them, have so many bytes."""
    with torch.device("meta"):
        model = models.build(config)
    linear = [module.weight for module in to_be_quantized(model).values()]
    quantized = {id(weight) for weight in linear}
    plain = [weight.numel() for weight in model.parameters()]
    rest = [2 * w.numel() for w in model.parameters() if id(w) not in quantized]
    found = {name: Counter(n * BYTES[name] for n in plain) for name in ("fp32", "fp16", "bf16")}
    # GPT-2's layers keep their weights turned.
    rows = [4 * weight.shape[config.model_type == "gpt2"] for weight in linear]
    found["int8"] = Counter(rest + [weight.numel() for weight in linear] + rows)
    found["nf4"] = Counter(rest + [size for weight in linear for size in _nf4(weight.numel())])
    return found


def _nf4(numbers: int) -> list[int]:
    """Bytes of NF4's tensors: packed weights, 8-bit scales, their scales, tables, offset."""
    blocks = -(-numbers // 64)
    return [-(-numbers // 2), blocks, 4 * -(-blocks // 256), 4 * 16, 4 * 256, 4]


def _segments(tensors: dict[int, int]) -> int:
    """Bytes of the segments for so many tensors of so many bytes, each size in its own.

    Of a segment of 20 MiB the end stays empty that is too small for one more of the size.
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


def serving_formula(serving: Serving, gpu: GPU | str | int | None = None) -> dict:
    """Bytes of a serving by what they are for, at the worse of the two phases' worst moments.

    Of weights, kv_cache, activations, logits and workspaces; `phase` says which moment it is.

    Raises ValueError outside the form's domain (architecture, cache, attention, window), and for a
    card without the number format.
    """
    card, of = find_gpu(gpu), shape(serving.model)
    require_native(serving.compute_dtype, card.name, "bfloat16" in card.native_dtypes)
    for name, allowed in (("cache", "dynamic"), ("attention", "sdpa")):
        if getattr(serving, name) != allowed:
            raise ValueError(f"{name} is {getattr(serving, name)!r}: the formula allows {allowed}")
    if of.longest and serving.prompt + serving.new_tokens > of.longest:
        raise ValueError(
            f"prompt and new_tokens are {serving.prompt} + {serving.new_tokens}: the formula "
            f"allows up to {of.longest} together"
        )
    moments = _moments(of, serving, card)
    worst = max(moments, key=lambda one: sum(one[name] for name in MOVING))
    held = {"weights": of.weights[serving.weights], **worst, "workspaces": card.workspace}
    return held | {"phase": held.pop("phase")}


def _moments(of: Shape, serving: Serving, card: GPU) -> list[dict]:
    """The moments that can be the worst: bytes of what comes and goes, and the phase."""
    each, texts, prompt = BYTES[serving.weights], serving.batch_size, serving.prompt
    token = 2 * of.layers * of.groups * of.size * each * texts
    logits = texts * prompt * of.vocabulary * each if serving.all_logits else 0
    working, given = _activations(of, serving, card, each), texts * prompt * of.hidden * each
    moments = [("prefill", token * prompt, working, 0), ("prefill", token * prompt, given, logits)]
    if serving.new_tokens > 1:
        last = token * (prompt + serving.new_tokens - 1)
        # A layer's tensors are there twice while they grow.
        moments.append(("decode", last + last // of.layers, 0, 0))
        moments.append(("decode", last, _attending(of, serving, card, each), 0))
    return [dict(zip(("phase", *MOVING), one, strict=True)) for one in moments]


def judged(serving: Serving, gpu: GPU | str | int) -> str:
    """`fits`, `may fit` or `does not fit`, with the margin of `memlab.fits`.

    The form knows nothing of the allocator's cache, which `memlab.fits` replays. Activations leave
    blocks behind, those of another moment than the worst, too, and so does a growing cache, whose
    old tensors are too small for the new ones; weights leave the ends of their segments empty. What
    fits does so with the most of both once more, and with weights by whole segments.
    """
    card, of = limited(gpu, MARGIN), shape(serving.model)
    held, moments = serving_formula(serving, card), _moments(of, serving, card)
    needed = sum(n for name, n in held.items() if name != "phase") + (card.context or 0)
    again = sum(max(one[name] for one in moments) for name in ("activations", "kv_cache"))
    again += of.segments[serving.weights] - of.weights[serving.weights]
    if needed + again <= room(card):
        return "fits"
    return "may fit" if needed <= room(card) else "does not fit"


def shares_keys(card: GPU) -> dict[int, bool]:
    """Whether a fused kernel takes fewer key heads than query heads, by the bytes of a number."""
    formats = {2: torch.float16, 4: torch.float32}
    return {
        each: model_routes(dtype, True, card.capability)[0] != "math"
        for each, dtype in formats.items()
    }


def _not_fused(of: Shape, card: GPU, each: int) -> bool:
    """Whether attention is computed in fp32, with keys and values copied for every head."""
    return of.groups < of.heads and not shares_keys(card)[each]


def _attending(of: Shape, serving: Serving, card: GPU, each: int) -> int:
    """What attention works with for the last token, in bytes, where it is not fused.

    Keys and values of all heads in fp32, the keys once more, scaled, the scores, and in half
    precision the keys and values of the groups in fp32.
    """
    if not _not_fused(of, card, each):
        return 0
    cached = serving.batch_size * (serving.prompt + serving.new_tokens - 1)
    of_groups = 8 * of.groups * of.size if each == 2 else 0
    return cached * (12 * of.heads * of.size + of_groups + 4 * of.heads)


def _activations(of: Shape, serving: Serving, card: GPU, each: int) -> int:
    """The most that a layer works with while the prompt is read, in bytes."""
    texts, prompt = serving.batch_size, serving.prompt
    tokens, hidden, wide = texts * prompt, of.hidden, of.wide
    # Positions, and for Llama's kind the sines and cosines of one text.
    beside = prompt * (8 + (2 * of.size * each if of.gated else 0))
    feed = 3 * wide + 4 * hidden if of.gated else 22 * hidden
    moments = [feed * each * tokens]
    if serving.weights == "nf4":  # a layer's weight is unpacked, its scales too
        unpacked = wide * hidden * each + wide * hidden // 64 * 8 + 1024
        held = 2 * wide + 4 * hidden if of.gated else 11 * hidden
        moments.append(unpacked + held * each * tokens)
    if serving.weights == "int8" and of.gated:
        moments.append((8 * wide + 9 * hidden + 4) * tokens)
    if _not_fused(of, card, each):  # the scores of all pairs, before and after softmax
        pairs = 8 * of.heads * texts * prompt**2 + 4 * prompt**2
        held = 12 * hidden + 4 * of.groups * of.size if each == 2 else 7 * hidden
        moments.append(pairs + held * each * tokens)
    return max(moments) + beside
