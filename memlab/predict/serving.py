"""The memory of inference: of the prefill, which reads a prompt, and of writing token by token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from memlab.card.device import SimulatedGPU
from memlab.card.step_time import step_time
from memlab.footprint import Category, Footprint, Phase, StepTime, Timeline
from memlab.gpus import GPU
from memlab.predict.run import weights_of
from memlab.spec.recipe import QUANTIZED
from memlab.spec.serving import Serving
from memlab.trace.log import Log
from memlab.trace.tracer import Tracer
from memlab.trace.work import drop_small_ops
from memlab.units import in_unit_of
from memlab.workloads.generation import KV_CACHE, LOGITS, Generation, skipped_steps

# What inference calls that a trainer's category holds; the rest keeps its name.
NAMES = {Category.PARAMETERS: "weights", Category.TEMPORARY: "activations"}


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
        if time is None:
            return None
        return self.tokens / time.high, self.tokens / time.expected, self.tokens / time.low

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
        largest = max(self.peak_reserved or 0, *rows[-1][1:])
        lines = [f"{'':<12} {'prefill':>14} {'decode':>14}"]
        for name, *figures in rows:
            one, other = (in_unit_of(n, largest) for n in figures)
            lines.append(f"{name.replace('_', ' '):<12} {one:>14} {other:>14}")
        lines.append(f"KV cache at the end {in_unit_of(self.kv_cache, largest)}")
        if self.peak_reserved is not None:
            lines.append(f"peak reserved {in_unit_of(self.peak_reserved, largest)}")
        if self.prefill_time:
            seconds = str(self.prefill_time).partition(":")[0]
            lines.append(f"prefill, estimated: {seconds}")
        if self.tokens_per_second:
            low, expected, high = self.tokens_per_second
            lines.append(f"decode, estimated: {expected:,.0f} tokens/s ({low:,.0f} to {high:,.0f})")
        return "\n".join(lines + [f"assumed: {one}" for one in self.assumptions])


def serving_footprint(
    serving: Serving, log: Log, footprint: Footprint, card: GPU
) -> ServingFootprint:
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
        times[1] = _so_often(times[1], steps / (steps - skipped_steps(steps)))
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


class _UnlimitedCard(SimulatedGPU):
    """A card for what is the same under any setting of the allocator."""

    reads_environment = False


def log_of_serving(serving: Serving, card: GPU, numbered: bool = False) -> Log:
    """What `serving` does to memory, at its own depth, on a card like this without a limit.

    numbered: whether the log tells layers apart.
    """
    with _UnlimitedCard(card.without_limit()) as simulated:
        place = simulated.device if serving.base not in QUANTIZED else "cpu"
        generation = Generation(serving, simulated.device, place)
        tracer = simulated.tracer
        simulated.watch(generation.model, inputs=_inputs(generation))
        simulated.reset_peak()
        generation.run(tracer)
        if generation.skipped:
            said = f"{generation.skipped} decode steps not run, the cache grows by what they add"
            tracer.assumptions[said] = None
        work = drop_small_ops(simulated.work.of_step)
        return Log.of(tracer, weights_of(generation.model), numbered, work)


def measure_serving(serving: Serving, device: str = "cpu") -> ServingFootprint:
    """The same run here, every step of it, traced storage by storage.

    device: a torch device; sizes are those of the tensors, without an allocator's rounding.
    """
    generation = Generation(serving, device)
    with Tracer() as tracer:
        tracer.watch(generation.model, inputs=_inputs(generation))
        generation.run(tracer, all_steps=True)
    return _by_phase(tracer.footprint())


def _inputs(generation: Generation) -> list[torch.Tensor]:
    return [one for one in (generation.encoded, generation.text) if one is not None]


def _by_phase(footprint: Footprint) -> ServingFootprint:
    timeline = footprint.timeline
    if timeline is None:
        raise ValueError("the phases of inference need a footprint with a timeline")
    totals, last = timeline.totals(), 0
    found: list[dict[str, int]] = []
    for phase in (Phase.PREFILL, Phase.DECODE):
        moments = [i for i, one in enumerate(timeline.phases) if one == phase and i]
        found.append(_held(timeline, max(moments, key=totals.__getitem__)) if moments else {})
        last = max([last, *moments])
    prefill, decode = found
    return ServingFootprint(prefill, decode, _held(timeline, last)[KV_CACHE], footprint)


def _held(timeline: Timeline, moment: int) -> dict[str, int]:
    """Bytes at a moment by what they are for inference."""
    found = dict.fromkeys(["weights", KV_CACHE, "activations", LOGITS], 0)
    for life in timeline.alive(moment):
        name = NAMES.get(life.category, str(life.category))
        name = life.module if life.module in (KV_CACHE, LOGITS) else name
        found[name] = found.get(name, 0) + life.nbytes
    rounding = timeline.levels[Category.ROUNDING][moment]
    return found | ({str(Category.ROUNDING): rounding} if rounding else {})
