"""The memory and time of inference, separately for prefill (the prompt) and decode (new tokens).

A serving runs once on a simulated GPU, at its own sizes. Of many decode steps only the first and
the last two run. In between, the KV cache grows by the tokens of the skipped steps.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memlab.card.step_time import step_time
from memlab.footprint import Category, Footprint, Phase, StepTime, Timeline
from memlab.gpus import GPU
from memlab.predict.run import OwnLoop, weights_of
from memlab.spec.recipe import QUANTIZED
from memlab.spec.serving import Serving
from memlab.trace.log import Log
from memlab.trace.work import drop_small_ops
from memlab.units import in_unit_of
from memlab.workloads.generation import KV_CACHE, LOGITS, Generation, skipped_steps

# Category of a training footprint -> its name in inference. Other categories keep their names.
NAMES = {Category.PARAMETERS: "weights", Category.TEMPORARY: "activations"}


@dataclass(frozen=True)
class ServingFootprint:
    """The memory of inference at the worst moment of each of its two phases.

    prefill, decode: bytes by category (weights, kv_cache, activations, logits, and the other
        categories of a `Footprint`). decode is empty for one new token, which the prefill writes.
    kv_cache: bytes that the cache holds after the last token. While a token is written, a layer of
        a growing cache holds its tensors twice, so the worst moment of a phase can have more.
    footprint: the footprint of the whole run, with reserved memory, context and assumptions.
    prefill_time, decode_time: the estimated time of each phase, by the rates of a training step
        (`memlab.card.step_time`). None for a GPU without rates. The estimates were compared with
        one published generation only (the book's chapter on deploying).
    tokens: the number of tokens that the decode phase writes, in all texts together.
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
        """(low, expected, high) tokens per second of decoding; None without an estimated time."""
        time = self.decode_time
        if time is None:
            return None
        return self.tokens / time.high, self.tokens / time.expected, self.tokens / time.low

    @property
    def peak_allocated(self) -> int:
        """Bytes at the worst moment of both phases."""
        return max(sum(held.values()) for held in (self.prefill, self.decode))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions in place of values that only a real GPU has, one line each."""
        return self.footprint.assumptions

    @property
    def peak_reserved(self) -> int | None:
        """Bytes that the caching allocator has reserved on the device; None on a CPU."""
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
        largest = max(self.peak_reserved or 0, *rows[-1][1:])
        lines = [f"{'':<12} {'prefill':>14} {'decode':>14}"]
        for name, *figures in rows:
            prefill, decode = (in_unit_of(n, largest) for n in figures)
            lines.append(f"{name.replace('_', ' '):<12} {prefill:>14} {decode:>14}")
        lines.append(f"KV cache at the end {in_unit_of(self.kv_cache, largest)}")
        if self.peak_reserved is not None:
            lines.append(f"peak reserved {in_unit_of(self.peak_reserved, largest)}")
        if self.prefill_time:
            seconds = str(self.prefill_time).partition(":")[0]
            lines.append(f"prefill, estimated: {seconds}")
        if self.tokens_per_second:
            low, expected, high = self.tokens_per_second
            lines.append(f"decode, estimated: {expected:,.0f} tokens/s ({low:,.0f} to {high:,.0f})")
        return "\n".join(lines + [f"assumed: {assumption}" for assumption in self.assumptions])


def serving_footprint(
    serving: Serving, log: Log, footprint: Footprint, card: GPU
) -> ServingFootprint:
    """The `ServingFootprint` of a serving's log, with the estimated time of each phase."""
    served, steps = by_phase(footprint), serving.new_tokens - 1
    # The log has the work of the decode steps that ran. Count it as often as all steps need it.
    often = steps / max(1, steps - skipped_steps(steps))
    times = []
    for phase, runs in (Phase.PREFILL, 1), (Phase.DECODE, often):
        work: Any = Counter({part: n * runs for part, n in log.work.items() if part.phase == phase})
        try:
            times.append(step_time(work, card, serving.batch_size) if work else None)
        except ValueError:  # a GPU without rates
            return served
    tokens = serving.batch_size * steps
    return replace(served, prefill_time=times[0], decode_time=times[1], tokens=tokens)


def log_of_serving(serving: Serving, card: GPU, numbered: bool) -> Log:
    """The log of a serving at its own depth, on a GPU like `card` without a limit.

    numbered: whether the log keeps the numbers of layers.
    """
    with OwnLoop(card.without_limit()) as simulated:
        # A quantized base is built on the host and quantized on its way to the GPU.
        place = simulated.device if serving.base not in QUANTIZED else "cpu"
        generation = Generation(serving, simulated.device, place)
        tracer = simulated.tracer
        simulated.watch(generation.model, inputs=inputs_of(generation))
        simulated.reset_peak()  # loading the model is no part of either phase
        generation.run(tracer)
        if generation.skipped:
            assumption = (
                f"{generation.skipped} decode steps are not run, the cache grows by what "
                "they would add"
            )
            tracer.assumptions[assumption] = None
        work = drop_small_ops(simulated.work.of_step)
        return Log.of(tracer, weights_of(generation.model), numbered, work)


def inputs_of(generation: Generation) -> list[torch.Tensor]:
    """The input tensors of a generation: the encoder's tokens, if any, and the decoder's."""
    return [tensor for tensor in (generation.encoded, generation.text) if tensor is not None]


def by_phase(footprint: Footprint) -> ServingFootprint:
    """A footprint of inference as a `ServingFootprint`, without times.

    Raises ValueError for a footprint without a timeline.
    """
    timeline = footprint.timeline
    if timeline is None:
        raise ValueError("the phases of inference need a footprint with a timeline")
    totals, last = timeline.totals(), 0
    worst: list[dict[str, int]] = []
    for phase in (Phase.PREFILL, Phase.DECODE):
        # Moment 0 is the state before the first event, and belongs to no phase.
        moments = [i for i, name in enumerate(timeline.phases) if name == phase and i]
        worst.append(_held(timeline, max(moments, key=totals.__getitem__)) if moments else {})
        last = max([last, *moments])
    # After the last event of both phases the cache holds all tokens.
    prefill, decode = worst
    return ServingFootprint(prefill, decode, _held(timeline, last)[KV_CACHE], footprint)


def _held(timeline: Timeline, moment: int) -> dict[str, int]:
    """Category of inference -> bytes at a moment of the timeline."""
    nbytes = dict.fromkeys(["weights", KV_CACHE, "activations", LOGITS], 0)
    for life in timeline.alive(moment):
        name = NAMES.get(life.category, str(life.category))
        # `Generation` names the tensors of the cache and the logits in place of their module.
        name = life.module if life.module in (KV_CACHE, LOGITS) else name
        nbytes[name] = nbytes.get(name, 0) + life.nbytes
    rounding = timeline.levels[Category.ROUNDING][moment]
    return nbytes | ({str(Category.ROUNDING): rounding} if rounding else {})
