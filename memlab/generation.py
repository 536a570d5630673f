"""The memory of inference: a prompt is read (prefill), then token after token is written (decode).

One greedy loop in plain PyTorch runs on a simulated card and on the device that is here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch.utils._pytree import tree_leaves

from memlab import models, quantized
from memlab.card.gpu import SimulatedGPU
from memlab.card.loading import loaded_weights
from memlab.card.step_time import step_time
from memlab.card.work import without_trifles
from memlab.footprint import Category, Footprint, Phase, StepTime, Timeline
from memlab.gpus import GPU
from memlab.predict.run import weights_of
from memlab.serving import Serving, head_shape
from memlab.simulation import full_log, serve
from memlab.trace.log import Log
from memlab.trace.tracer import Tracer
from memlab.units import mib

KV_CACHE, LOGITS = "kv_cache", "logits"
# What inference calls that a trainer's category holds; the rest keeps its name.
NAMES = {Category.PARAMETERS: "weights", Category.TEMPORARY: "activations"}
MOST_STEPS = 4  # decode steps that are all run; of more the first and the last two


@dataclass(frozen=True)
class ServingFootprint:
    """What inference holds at the worst moment of each of its two phases.

    prefill, decode: bytes by category (weights, kv_cache, activations, logits, and what else a
        `Footprint` names); decode is empty for one new token, which the prefill writes.
    kv_cache: bytes that the cache holds once the last token is written. While a token is, a layer
        of a growing cache holds its tensors twice, so that a phase's worst moment can have more.
    footprint: of the whole run, with reserved memory, context and assumptions.
    prefill_time, decode_time: how long each phase is estimated to take, by the rates that a
        training step has (`memlab.card.step_time`); None without a card that has rates. They were
        compared with one published generation only (the book's chapter on deploying).
    tokens: written by the decode phase, of all texts.
    """

    prefill: dict[str, int]
    decode: dict[str, int]
    kv_cache: int
    footprint: Footprint = field(repr=False, compare=False)
    prefill_time: StepTime | None = field(default=None, repr=False)
    decode_time: StepTime | None = field(default=None, repr=False)
    tokens: int = 0

    @property
    def tokens_per_second(self) -> tuple[float, float, float] | None:
        """(low, expected, high) of the decode phase; None without its seconds."""
        time = self.decode_time
        return time and tuple(self.tokens / n for n in (time.high, time.expected, time.low))

    @property
    def peak_phase(self) -> Phase:
        """The phase with the worse of the two moments."""
        return max((Phase.PREFILL, Phase.DECODE), key=lambda one: sum(getattr(self, one).values()))

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes by category at the worse of the two moments."""
        return getattr(self, self.peak_phase)

    @property
    def peak_allocated(self) -> int:
        """Bytes at the worse of the two moments."""
        return sum(self.breakdown.values())

    @property
    def times(self) -> dict[str, StepTime]:
        """What is estimated to take how long; empty without an estimate."""
        both = {Phase.PREFILL: self.prefill_time, Phase.DECODE: self.decode_time}
        return {phase: time for phase, time in both.items() if time}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What stands in for values that only a real card has, a line each."""
        return self.footprint.assumptions

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
            "prefill_time": self.prefill_time and self.prefill_time.as_dict(),
            "decode_time": self.decode_time and self.decode_time.as_dict(),
            "tokens_per_second": self.tokens_per_second,
            "assumptions": list(self.assumptions),
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
        if self.prefill_time:
            seconds = str(self.prefill_time).partition(":")[0]
            lines.append(f"prefill, estimated: {seconds}")
        if self.tokens_per_second:
            low, expected, high = self.tokens_per_second
            lines.append(f"decode, estimated: {expected:,.0f} tokens/s ({low:,.0f} to {high:,.0f})")
        return "\n".join(lines + [f"assumed: {one}" for one in self.assumptions])


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
        dtype = quantized.COMPUTE_DTYPES[serving.compute_dtype]
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
            if not all_steps and done in range(1, 1 + _skipped(steps)):
                if done == 1:
                    self.skipped = _skipped(steps)
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


def _skipped(steps: int) -> int:
    """How many of so many decode steps a simulation jumps over."""
    return steps - 3 if steps > MOST_STEPS else 0


def cache_tensors(cache) -> list[torch.Tensor]:
    """The tensors that a cache of transformers holds."""
    if cache is None:
        return []
    parts = [getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross")]
    layers = [layer for part in parts if part for layer in part.layers] or cache.layers
    found = tree_leaves([vars(layer) for layer in layers])
    return [one for one in found if isinstance(one, torch.Tensor)]


# ---------------------------------------------------------------------- simulated and measured


def simulate_serving(serving: Serving, card: GPU) -> ServingFootprint:
    """What `memlab.simulate` gives of a `Serving`."""
    log = full_log(serving, card)
    return told(serving, log, serve(serving, log, card), card)


def told(serving: Serving, log: Log, footprint: Footprint, card: GPU) -> ServingFootprint:
    """The footprint of a serving's log in the words of inference, with each phase's seconds."""
    found = _by_phase(footprint)
    phases = [
        Counter({one: n for one, n in log.work.items() if one.phase == phase})
        for phase in (Phase.PREFILL, Phase.DECODE)
    ]
    try:
        times = [work and step_time(work, card, serving.batch_size) or None for work in phases]
    except ValueError:  # a card without rates
        return found
    steps = serving.new_tokens - 1
    if times[1]:
        times[1] = _so_often(times[1], steps / (steps - _skipped(steps)))
    return replace(
        found,
        prefill_time=times[0],
        decode_time=times[1],
        tokens=serving.batch_size * steps,
    )


def _so_often(time: StepTime, times: float) -> StepTime:
    """The seconds of something that happens so many times."""
    parts = {name: n * times for name, n in time.parts.items()}
    scaled = {name: getattr(time, name) * times for name in ("low", "expected", "high")}
    return replace(time, parts=parts, flops=round(time.flops * times), **scaled)


def log_of_serving(serving: Serving, card: GPU, numbered=False) -> Log:
    """What `serving` does to memory, at its own depth, on a card like this without a limit.

    numbered: whether the log tells layers apart.
    """
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
        work = without_trifles(tracer.work.of_step)
        loaded = loaded_weights(tracer, generation)
        return Log.of(tracer, weights_of(generation.model), loaded, numbered, work)


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
