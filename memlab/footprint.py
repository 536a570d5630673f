"""What a training step holds at its worst moment: bytes inside, GiB or MiB in print."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from memlab.units import in_unit_of, seconds_text


class _Word(StrEnum):
    """A text with a closed list of values, which prints as the text that it is."""

    __repr__ = str.__repr__


class Category(_Word):
    """What memory is for, in the order of printing and drawing.

    Workspaces are memory that CUDA libraries and kernels take for themselves; rounding is what
    the allocator's blocks have over the tensors.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"
    TEMPORARY = "temporary"
    INPUTS = "inputs"
    BUFFERS = "buffers"
    WORKSPACES = "workspaces"
    ROUNDING = "rounding"


NOBODY = "nobody estimated it"  # why a measured footprint has no seconds
NOT_TENSORS = (Category.WORKSPACES, Category.ROUNDING)


class Phase(_Word):
    """What a training step or inference is at: zero_grad is after a step, to the next birth."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "optimizer step"
    ZERO_GRAD = "zero_grad"
    PREFILL = "prefill"  # of inference (`memlab.spec.serving`), as the next
    DECODE = "decode"
    UNKNOWN = "unknown"  # CUDA's counters tell no phase


@dataclass(frozen=True)
class Allocation:
    """One piece of memory: what it is, who made it, and from which moment to which it lived.

    nbytes: of the tensor, or of the workspace. module: the path of the module that made it, or
    that it belongs to (parameters, gradients, optimizer states). operation: PyTorch's name of the
    operation. born, died: moments of the timeline; died is None for what outlives it. line: the
    line of the reader's script that made it, where one is followed.
    """

    nbytes: int
    category: Category
    module: str
    operation: str
    born: int
    died: int | None
    line: str = ""


@dataclass(frozen=True)
class Timeline:
    """Bytes by category after each birth or death, and the phase each one happened in.

    A moment is an index into `phases` and into each list of `levels`; 0 is the state before the
    first event. lives: everything that lived. peak: the moment of the highest sum.
    """

    phases: list[Phase]
    levels: dict[Category, list[int]]
    lives: list[Allocation] = field(default_factory=list, repr=False)
    peak: int = 0

    def spans(self) -> list[tuple[Phase, int, int]]:
        """(phase, first event, event after the last) of each unbroken stretch."""
        spans: list[tuple[Phase, int, int]] = []
        start = 0
        for i in range(1, len(self.phases) + 1):
            if i == len(self.phases) or self.phases[i] != self.phases[start]:
                spans.append((self.phases[start], start, i))
                start = i
        return spans

    def totals(self) -> list[int]:
        """Bytes of all categories at each moment."""
        return [sum(levels) for levels in zip(*self.levels.values(), strict=True)]

    def alive(self, moment: int) -> list[Allocation]:
        """What lives at a moment, the largest first."""
        there = [
            life
            for life in self.lives
            if life.born <= moment and (life.died is None or life.died > moment)
        ]
        return sorted(there, key=lambda life: -life.nbytes)


@dataclass(frozen=True)
class StepTime:
    """An estimate of the seconds of one optimizer step on a card (`memlab.card.step_time`).

    low, expected, high: seconds, where programs reach more, as much or less of the card's data
    sheet than is usual. parts: part of the step -> its seconds; they sum to `expected`. flops:
    operations of all matrix products, without those that activation checkpointing repeats.
    peak_rate: operations per second of the fastest format that the step multiplies in. samples:
    sequences of the step, None in a loop of the reader's own. sent: bytes that this rank sends to
    others, of which `communication` is what no kernels hide.
    """

    PARTS: ClassVar[tuple[str, ...]] = (
        "matrix products",
        "memory traffic",
        "recomputation",
        "optimizer",
        "waiting for launches",
        "communication",
        "copies to the host and back",
    )

    low: float
    expected: float
    high: float
    parts: dict[str, float]
    flops: int
    peak_rate: float
    samples: int | None = None
    sent: int = 0

    @property
    def samples_per_second(self) -> float | None:
        """Sequences per second, by the expected time."""
        return None if self.samples is None else self.samples / self.expected

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the card's peak rate that the model gets."""
        return self.flops / (self.expected * self.peak_rate) if self.peak_rate else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "low": self.low,
            "expected": self.expected,
            "high": self.high,
            "parts": dict(self.parts),
            "mfu": self.mfu,
            "sent_bytes": self.sent,
        }

    def __str__(self) -> str:
        text = (
            f"{seconds_text(self.expected)} ({seconds_text(self.low)} to {seconds_text(self.high)})"
        )
        more = [
            f"{part} {share / self.expected:.0%}" for part, share in self.parts.items() if share
        ]
        return f"{text}: {', '.join(more)}"


@dataclass(frozen=True)
class Footprint:
    """The memory of one training step.

    peak_allocated: bytes of tensors (CPU) or of allocator blocks (CUDA and simulated) at the
        worst moment.
    peak_reserved: bytes that the caching allocator has taken from the device; None on a CPU,
        which has no caching allocator.
    breakdown: bytes by category at that moment; sums to peak_allocated.
    peak_phase: `forward`, `backward` or `optimizer step`.
    parameters, trainable_parameters: counts, not bytes.
    assumptions: what stands in for values that only a real card has, where the shape of a tensor
        follows from them; a line each.
    context: bytes of the CUDA context; device_used: bytes in use on the whole device, by all
        processes; None where the machine has none.
    step_time: how long the step is estimated to take; no_time: why there is no estimate.
    """

    peak_allocated: int
    peak_reserved: int | None
    breakdown: dict[Category, int]
    peak_phase: Phase
    parameters: int | None = None
    trainable_parameters: int | None = None
    context: int | None = None
    device_used: int | None = None
    assumptions: tuple[str, ...] = ()
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    step_time: StepTime | None = field(default=None, repr=False)
    no_time: str = field(default=NOBODY, repr=False, compare=False)

    @property
    def step_seconds(self) -> StepTime:
        """The estimated seconds of the step; raises ValueError where there is no estimate."""
        if self.step_time is None:
            raise ValueError(f"this footprint has no seconds: {self.no_time}")
        return self.step_time

    @property
    def samples_per_second(self) -> float | None:
        """Sequences per second by the estimate; None without one and in a loop of one's own."""
        return self.step_time.samples_per_second if self.step_time else None

    @property
    def peak_tensors(self) -> int:
        """Bytes of tensors at the peak, without the allocator's rounding and workspaces."""
        return self.peak_allocated - sum(self.breakdown.get(name, 0) for name in NOT_TENSORS)

    def by_line(self) -> dict[str, int]:
        """Bytes at the peak by the line of the script that made them, the largest first.

        What libraries and the allocator hold stands under `workspaces` and `rounding`, what no line
        of a script made under an empty name. Raises ValueError for a footprint without a timeline.
        """
        timeline = self._traced()
        lines: Counter[str] = Counter()
        lines[Category.ROUNDING] = timeline.levels[Category.ROUNDING][timeline.peak]
        for life in timeline.alive(timeline.peak):
            lines[life.category if life.category in NOT_TENSORS else life.line] += life.nbytes
        return {line: nbytes for line, nbytes in lines.most_common() if nbytes}

    def worst_of_each_phase(self) -> dict[Phase, int]:
        """Bytes at the highest moment of each phase, in the order of the step.

        Raises ValueError for a footprint without a timeline.
        """
        timeline = self._traced()
        worst: dict[Phase, int] = {}
        for phase, total in zip(timeline.phases, timeline.totals(), strict=True):
            worst[phase] = max(worst.get(phase, 0), total)
        return worst

    def _traced(self) -> Timeline:
        if self.timeline is None:
            raise ValueError("this footprint has no timeline: only its peak was counted")
        return self.timeline

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the timeline."""
        return {
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "peak_tensors": self.peak_tensors,
            "breakdown": dict(self.breakdown),
            "peak_phase": self.peak_phase,
            "parameters": self.parameters,
            "trainable_parameters": self.trainable_parameters,
            "context": self.context,
            "device_used": self.device_used,
            "assumptions": list(self.assumptions),
            "step_seconds": self.step_time and self.step_time.as_dict(),
            "samples_per_second": self.samples_per_second,
        }

    def rows(self) -> list[tuple[str, int]]:
        """(label, bytes) in the order of printing, empty categories left out."""
        rows = [(name.replace("_", " "), n) for name, n in self.breakdown.items() if n]
        rows.append((f"peak allocated, in {self.peak_phase}", self.peak_allocated))
        for label in ("peak_reserved", "context", "device_used"):
            if getattr(self, label) is not None:
                rows.append((label.replace("_", " "), getattr(self, label)))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        largest = max(n for _, n in rows)
        lines = [f"{label:<{width}}  {in_unit_of(n, largest):>12}" for label, n in rows]
        if self.step_time:
            lines.append(f"a step, estimated: {self.step_time}")
        elif self.context is not None and self.no_time != NOBODY:
            lines.append(f"no seconds: {self.no_time}")
        lines += [f"assumed: {assumption}" for assumption in self.assumptions]
        return "\n".join(lines)
