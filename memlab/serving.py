"""The memory of inference: a prompt is read (prefill), then token after token is written (decode).

One greedy loop in plain PyTorch runs on a simulated card and on the device that is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch
from torch.utils._pytree import tree_leaves

from memlab import models, quantized
from memlab.card.gpu import SimulatedGPU
from memlab.card.loading import loaded_by_transformers, loaded_weights
from memlab.card.memory import CardMemory, card_footprint
from memlab.fields import documentation, one_of, switch, whole, wrong
from memlab.fields import field as said
from memlab.footprint import Category, Footprint, Phase, Timeline
from memlab.gpus import GPU, find_gpu, require_native
from memlab.trace.depth import log_at_full_depth
from memlab.trace.ledger import Ledger
from memlab.trace.log import Log, replay
from memlab.trace.tracer import Tracer
from memlab.units import mib

DTYPES = quantized.COMPUTE_DTYPES
KV_CACHE, LOGITS = "kv_cache", "logits"
# What inference calls that a trainer's category holds; the rest keeps its name.
NAMES = {Category.PARAMETERS: "weights", Category.TEMPORARY: "activations"}
MOST_STEPS = 4  # decode steps that are all run; of more the first and the last two


@dataclass(frozen=True)
class Serving:
    """Everything that decides the memory of generating text from a model on one GPU.

    A sliding cache is the config's matter: where it has a `sliding_window`, transformers keeps no
    more tokens than that. Raises ValueError in one line: the field, the value, what is allowed.
    """

    model: object = said("llama-3-8b", "as of a `Recipe`")
    prompt: int = said(512, "tokens of each prompt; of an encoder's input", check=whole(1))
    new_tokens: int = said(16, "tokens written after it, the first by the prefill", check=whole(1))
    batch_size: int = said(1, "texts at a time", check=whole(1))
    weights: str = said(
        "fp16",
        "format of the weights",
        {
            "fp32": "",
            "fp16": "",
            "bf16": "",
            "int8": "bitsandbytes' LLM.int8 in all linear layers but the head",
            "nf4": "bitsandbytes' 4 bits with double quantization, in the same layers",
        },
    )
    compute_dtype: str | None = said(
        None,
        "of what is not quantized and of the products; None takes the weights' own, or fp16",
        ("fp32", "fp16", "bf16", None),
    )
    attention: str = said("sdpa", "transformers' implementation", ("eager", "sdpa"))
    cache: str = said(
        "dynamic",
        "keys and values of the tokens so far, by transformers' classes",
        {
            "dynamic": "a new tensor a step, one token longer",
            "static": "room for the whole text from the beginning",
            "fp8": "QuantizedCache with its fp8 backend, 8 bits a number",
            "none": "every step computes the whole text again",
        },
    )
    all_logits: bool = switch(
        False, "logits of every token of the prompt, as a plain forward pass gives them"
    )

    # What memlab's quantized bases and its logs of deep models ask a recipe for.
    block_size: ClassVar = 64
    double_quant: ClassVar = True
    freeze: ClassVar = ()
    ranks: ClassVar = 1

    def __post_init__(self):
        for one in fields(self):
            value, choices = getattr(self, one.name), one.metadata["choices"]
            if choices:
                one_of(one.name, value, choices)
            elif one.metadata["check"]:
                one.metadata["check"](one.name, value)
        plain = self.weights if self.weights in DTYPES else None
        if self.compute_dtype is None:
            object.__setattr__(self, "compute_dtype", plain or "fp16")
        elif plain and self.compute_dtype != plain:
            raise wrong("compute_dtype", self.compute_dtype, f"{plain}, that of the weights")
        config = models.config(self.model)
        if self.task not in ("causal-lm", "seq2seq-lm"):
            raise ValueError(
                f"model is {self.model_name!r}, for {self.task}: allowed are those that write "
                "text, by causal-lm or seq2seq-lm"
            )
        if self.cache == "fp8" and getattr(config, "sliding_window", None):
            raise ValueError(
                f"cache is 'fp8' and {self.model_name} has a sliding window: transformers "
                "quantizes full attention only, allowed are dynamic, static, none"
            )
        longest = models.max_length(config)
        if longest is not None and self.prompt + self.new_tokens > longest:
            raise ValueError(
                f"prompt and new_tokens are {self.prompt} + {self.new_tokens}: {self.model_name} "
                f"allows up to {longest} together"
            )

    @property
    def task(self) -> str:
        """What the architecture is usually for: causal-lm, or seq2seq-lm."""
        return models.default_task(self.model)

    @property
    def base(self) -> str:
        """The quantized format of the linear layers, by `Recipe.base`'s words."""
        return "none" if self.weights in DTYPES else self.weights

    @property
    def model_name(self) -> str:
        """The model as a short text."""
        return self.model if isinstance(self.model, str) else models.config(self.model).model_type

    def but(self, **changes) -> Serving:
        """The same with some fields changed."""
        known = [one.name for one in fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"a serving has no field {name!r}: allowed are {', '.join(known)}")
        if "weights" in changes:
            changes.setdefault("compute_dtype", None)
        return replace(self, **changes)


Serving.__doc__ = f"{Serving.__doc__}\n{documentation(Serving)}\n"


@dataclass(frozen=True)
class ServingFootprint:
    """What inference holds at the worst moment of each of its two phases.

    prefill, decode: bytes by category (weights, kv_cache, activations, logits, and what else a
        `Footprint` names); decode is empty for one new token, which the prefill writes.
    kv_cache: bytes that the cache holds once the last token is written. While a token is, a layer
        of a growing cache holds its tensors twice, so that a phase's worst moment can have more.
    footprint: of the whole run, with reserved memory, context and assumptions.
    """

    prefill: dict[str, int]
    decode: dict[str, int]
    kv_cache: int
    footprint: Footprint = field(repr=False, compare=False)

    @property
    def peak_allocated(self) -> int:
        """Bytes at the worse of the two moments."""
        return max(sum(self.prefill.values()), sum(self.decode.values()))

    @property
    def peak_reserved(self) -> int | None:
        """Bytes that the allocator has taken from the device; None on a CPU."""
        return self.footprint.peak_reserved

    def as_dict(self) -> dict:
        """Plain JSON values."""
        return {
            "prefill": dict(self.prefill),
            "decode": dict(self.decode),
            "kv_cache": self.kv_cache,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "assumptions": list(self.footprint.assumptions),
        }

    def __str__(self) -> str:
        names = {**self.prefill, **self.decode}
        rows = [(n, self.prefill.get(n, 0), self.decode.get(n, 0)) for n in names]
        rows.append(("together", sum(self.prefill.values()), sum(self.decode.values())))
        lines = [f"{'':<12} {'prefill':>14} {'decode':>14}"]
        lines += [f"{name.replace('_', ' '):<12} {mib(a):>14} {mib(b):>14}" for name, a, b in rows]
        lines.append(f"KV cache at the end {mib(self.kv_cache)}")
        if self.peak_reserved is not None:
            lines.append(f"peak reserved {mib(self.peak_reserved)}")
        return "\n".join(lines + [f"assumed: {one}" for one in self.footprint.assumptions])


def head_shape(config) -> tuple[int, int]:
    """(heads that have keys and values, size of a head) of a config's decoder."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return getattr(
        config, "num_key_value_heads", None
    ) or heads, size or config.hidden_size // heads


def kv_cache_bytes(model, tokens: int, batch_size: int = 1, bytes_each: float = 2) -> int:
    """Bytes of a cache: layers x 2 x key-value heads x head size x bytes x tokens x batch.

    model: as of a `Recipe`. tokens: of one text; of the two caches of an encoder-decoder model the
    sum, its input's and its output's. A sliding layer holds its window at most. The 2 stands for
    keys and values. The formula: Pope et al. 2023, Efficiently Scaling Transformer Inference.

    Raises ValueError for tokens or a batch below 1.
    """
    whole(1)("tokens", tokens)
    whole(1)("batch_size", batch_size)
    config = models.config(model)
    heads, size = head_shape(config)
    layers = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    kept = sum(min(tokens, window) if kind == "sliding_attention" else tokens for kind in kinds)
    return round(2 * heads * size * bytes_each * kept * batch_size)


# ---------------------------------------------------------------------- the loop


class Generation:
    """A model and its prompts, ready to `run()`: greedy, with a cache, without gradients.

    device: where everything lives. built_in: the device on which the model is made; a quantized
    base is made on the host.

    Attributes: model, recipe (the `Serving`), text (the tokens so far, int64, of shape
    [batch_size, tokens]; of an encoder-decoder model those of the decoder), skipped (decode steps
    that were jumped over).
    """

    def __init__(self, serving: Serving, device="cpu", built_in="cpu", seed: int = 0):
        self.recipe, self.skipped = serving, 0
        config = models.config(serving.model)
        dtype = DTYPES[serving.compute_dtype]
        with torch.device(built_in):
            self.model = models.build(config, serving.task, dtype, serving.attention, seed)
        self.model.eval()
        if serving.base != "none":
            quantized.quantize_base(self.model, serving)
        self.model.to(device)
        generator = torch.Generator().manual_seed(seed)
        shape = serving.batch_size, serving.prompt
        prompt = torch.randint(0, config.vocab_size, shape, generator=generator).to(device)
        self.encoded = prompt if serving.task == "seq2seq-lm" else None
        self.text = prompt
        if self.encoded is not None:
            first = config.decoder_start_token_id or 0
            self.text = torch.full((serving.batch_size, 1), first).to(device)

    @torch.no_grad()
    def run(self, tracer: Tracer, all_steps=False) -> None:
        """Write the new tokens; the tracer is told the phase, and which tensors are what.

        all_steps: whether every decode step runs; otherwise, of many, the first and the last two.
        """
        cache, more = self._empty_cache(), {}
        tracer.stage = Phase.PREFILL
        if self.encoded is not None:
            more["encoder_outputs"] = self.model.get_encoder()(input_ids=self.encoded)
        self._step(tracer, cache, self.text, more)
        steps = self.recipe.new_tokens - 1
        for done in range(steps):
            if not all_steps and steps > MOST_STEPS and done in range(1, steps - 2):
                if done == 1:
                    self.skipped = steps - 3
                    tracer.stage = Phase.UNKNOWN
                    self._skip(tracer, cache)
                continue
            tracer.stage = Phase.DECODE
            self._step(tracer, cache, self.text if cache is None else self.text[:, -1:], more)
        tracer.stage = None

    def _step(self, tracer, cache, tokens, more) -> None:
        """One forward pass, and the token that it says."""
        name = "input_ids" if self.encoded is None else "decoder_input_ids"
        more = {name: tokens, "past_key_values": cache, "use_cache": cache is not None} | more
        if self.encoded is None and not self.recipe.all_logits:
            more["logits_to_keep"] = 1  # as generate() asks
        logits = self.model(**more).logits
        tracer.name(logits, LOGITS)
        for tensor in cache_tensors(cache):
            tracer.name(tensor, KV_CACHE)
        self.text = torch.cat([self.text, logits[:, -1:].argmax(-1)], 1)

    def _skip(self, tracer, cache) -> None:
        """The cache and the text as they are after the skipped steps."""
        config, batch = self.model.config, self.recipe.batch_size
        zeros = torch.zeros((), dtype=torch.int64, device=self.text.device)
        self.text = torch.cat([self.text, zeros.expand(batch, self.skipped)], 1)
        if cache is None:
            return
        heads, size = head_shape(config)
        zero = torch.zeros((), dtype=self.model.dtype, device=self.text.device)
        for layer in getattr(cache, "self_attention_cache", cache).layers:
            window = getattr(layer, "sliding_window", None)
            tokens = min(self.skipped, window or self.skipped)
            layer.update(*[zero.expand(batch, heads, tokens, size)] * 2)
            if window:  # without the storage of what slid out
                layer.cumulative_length += self.skipped - tokens
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        for tensor in cache_tensors(cache):
            tracer.name(tensor, KV_CACHE)

    def _empty_cache(self):
        from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache

        config = self.model.config
        kinds = {
            "dynamic": lambda: DynamicCache(config=config),
            "static": lambda: StaticCache(config, self.text.shape[1] + self.recipe.new_tokens),
            "fp8": lambda: QuantizedCache("fp8", config),
        }
        if self.recipe.cache == "none":
            return None
        cache = kinds[self.recipe.cache]()
        if self.encoded is None:
            return cache
        return EncoderDecoderCache(cache, DynamicCache(config=config))


def cache_tensors(cache) -> list[torch.Tensor]:
    """The tensors that a cache of transformers holds."""
    if cache is None:
        return []
    parts = [getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross")]
    layers = [layer for part in parts if part for layer in part.layers] or cache.layers
    found = tree_leaves([vars(layer) for layer in layers])
    return [one for one in found if isinstance(one, torch.Tensor)]


# ---------------------------------------------------------------------- simulated and measured


def simulate_serving(serving: Serving, gpu: GPU | str | int | None = None) -> ServingFootprint:
    """What `memlab.simulate` gives of a `Serving`."""
    card = find_gpu(gpu)
    require_native(serving.compute_dtype, card.name, "bfloat16" in card.native_dtypes)
    log = log_at_full_depth(serving, lambda shallow: _log_of(shallow, card))
    log = log or _log_of(serving, card, numbered=True)
    ledger = Ledger(CardMemory(card, statistics=False))
    events = log.events()
    if serving.base != "none":
        events = loaded_by_transformers(log, card.total_memory)
    replay(events, ledger)
    return _by_phase(card_footprint(ledger, log))


def _log_of(serving, card, numbered=False) -> Log:
    with SimulatedGPU(card.without_limit()) as simulated:
        place = simulated.device if serving.base == "none" else "cpu"
        generation = Generation(serving, simulated.device, place)
        tracer = simulated.tracer
        simulated.watch(generation.model, inputs=_inputs(generation))
        simulated.reset_peak()
        generation.run(tracer)
        if generation.skipped:
            said = f"{generation.skipped} decode steps not run, the cache grows by what they add"
            tracer.assumptions[said] = None
        return Log.of(tracer, generation.model, loaded_weights(tracer, generation), numbered)


def measure_serving(serving: Serving, device="cpu") -> ServingFootprint:
    """The same run here, every step of it, traced storage by storage.

    device: a torch device; sizes are those of the tensors, without an allocator's rounding.
    """
    generation = Generation(serving, device)
    with Tracer() as tracer:
        tracer.watch(generation.model, inputs=_inputs(generation))
        generation.run(tracer, all_steps=True)
    return _by_phase(tracer.footprint())


def _inputs(generation) -> list[torch.Tensor]:
    return [one for one in (generation.encoded, generation.text) if one is not None]


def _by_phase(footprint: Footprint) -> ServingFootprint:
    timeline = footprint.timeline
    totals, found, last = timeline.totals(), [], 0
    for phase in (Phase.PREFILL, Phase.DECODE):
        moments = [i for i, one in enumerate(timeline.phases) if one == phase and i]
        found.append(_held(timeline, max(moments, key=totals.__getitem__)) if moments else {})
        last = max([last, *moments])
    return ServingFootprint(*found, _held(timeline, last)[KV_CACHE], footprint)


def _held(timeline: Timeline, moment: int) -> dict[str, int]:
    """Bytes at a moment by what they are for inference."""
    found = dict.fromkeys(["weights", KV_CACHE, "activations", LOGITS], 0)
    for life in timeline.alive(moment):
        name = NAMES.get(life.category, str(life.category))
        name = life.module if life.module in (KV_CACHE, LOGITS) else name
        found[name] = found.get(name, 0) + life.nbytes
    rounding = timeline.levels[Category.ROUNDING][moment]
    return found | ({str(Category.ROUNDING): rounding} if rounding else {})
