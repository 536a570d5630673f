"""The memory of inference by arithmetic: what `memlab.simulate` says of a `Serving`, in no time.

For decoders of GPT-2's and of Llama's kind with `sdpa` attention and a dynamic cache, as far as
their sliding window. Each number of a term is a count of tensors that live at the worst moment, as
the simulated log has them; tests compare both. What the allocator keeps in its cache it leaves out.
"""

from dataclasses import dataclass

import torch

from memlab import models
from memlab.gpus import GPU, find_gpu, require_native
from memlab.planning import MARGIN, limited, room
from memlab.quantized import to_be_quantized
from memlab.serving import Serving, head_shape

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "nf4": 2}  # of a number that is computed
GATED = ("llama", "mistral", "qwen2")
TYPES = ("gpt2", *GATED)


@dataclass(frozen=True)
class Shape:
    """What the form needs to know of a model.

    gated: Llama's feed-forward layer, of two widened products, in place of GPT-2's. groups: heads
    of keys. size: of a head. wide: of the feed-forward layer. longest: tokens, None for no end.
    weights: format -> bytes, scales included.
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


def shape(model) -> Shape:
    """The shape of a model, as of a `Recipe`; raises ValueError for another architecture."""
    config = models.config(model)
    if config.model_type not in TYPES:
        raise ValueError(f"model type is {config.model_type!r}: allowed are {', '.join(TYPES)}")
    groups, size = head_shape(config)
    wide = next((getattr(config, n) for n in models.WIDTHS if getattr(config, n, None)), None)
    ends = models.max_length(config), getattr(config, "sliding_window", None)
    one, two = (_weights(models.with_layers(config, layers)) for layers in (1, 2))
    layers = config.num_hidden_layers
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
        weights={name: one[name] + (layers - 1) * (two[name] - one[name]) for name in one},
    )


def _weights(config) -> dict[str, int]:
    """Bytes of a model's weights in each format."""
    with torch.device("meta"):
        model = models.build(config)
    numbers = sum(weight.numel() for weight in model.parameters())
    linear = [module.weight for module in to_be_quantized(model).values()]
    rest = 2 * (numbers - sum(weight.numel() for weight in linear))
    # GPT-2's layers keep their weights turned.
    rows = sum(w.shape[config.model_type == "gpt2"] for w in linear)
    found = {name: numbers * BYTES[name] for name in ("fp32", "fp16", "bf16")}
    found["int8"] = rest + sum(weight.numel() for weight in linear) + 4 * rows
    found["nf4"] = rest + sum(map(_nf4, linear))
    return found


def _nf4(weight) -> int:
    """Half a byte a weight, a byte for each 64, 4 for each 256 of these, and the tables."""
    blocks = -(-weight.numel() // 64)
    return -(-weight.numel() // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256) + 4


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
    each, texts, prompt = BYTES[serving.weights], serving.batch_size, serving.prompt
    token = 2 * of.layers * of.groups * of.size * each * texts
    logits = texts * prompt * of.vocabulary * each if serving.all_logits else 0
    working = _activations(of, serving, card, each)
    at_logits = texts * prompt * of.hidden * each + logits
    prefill = {
        "kv_cache": token * prompt,
        "activations": working if working >= at_logits else at_logits - logits,
        "logits": 0 if working >= at_logits else logits,
    }
    last = token * (prompt + serving.new_tokens - 1)
    # A layer's tensors are there twice while they grow.
    grown = last + last // of.layers if serving.new_tokens > 1 else 0
    decode = {"kv_cache": grown, "activations": 0, "logits": 0}
    both = {"prefill": prefill, "decode": decode}
    phase = max(both, key=lambda name: sum(both[name].values()))
    held = {"weights": of.weights[serving.weights], **both[phase], "workspaces": card.workspace}
    return held | {"phase": phase}


def judged(serving: Serving, gpu: GPU | str | int) -> str:
    """`fits`, `may fit` or `does not fit`, with the margin of `memlab.fits`.

    The form knows nothing of the allocator's cache, which `memlab.fits` replays. Activations leave
    blocks behind, and so does a growing cache, whose old tensors are too small for the new ones:
    what fits does so with both once more.
    """
    card = limited(gpu, MARGIN)
    held = serving_formula(serving, card)
    needed = sum(n for name, n in held.items() if name != "phase") + (card.context or 0)
    again = held["activations"] + held["kv_cache"]
    if needed + again <= room(card):
        return "fits"
    return "may fit" if needed <= room(card) else "does not fit"


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
    fused = each == 2 and card.capability[0] >= 8
    if of.groups < of.heads and not fused:  # the scores of all pairs, before and after softmax
        pairs = 8 * of.heads * texts * prompt**2 + 4 * prompt**2
        held = 12 * hidden + 4 * of.groups * of.size if each == 2 else 7 * hidden
        moments.append(pairs + held * each * tokens)
    return max(moments) + beside
