"""The result of a prediction or a measurement: the memory of one step at its peak.

A `Footprint` may carry a `Timeline` (every allocation of the step) and a `StepTime` (estimated
seconds). All sizes are bytes; printed tables use MiB or GiB, which are powers of two.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from memlab.units import in_unit_of, seconds_text


class _Word(StrEnum):
    """A string enumeration whose members print as plain strings, also inside containers."""

    __repr__ = str.__repr__


class Category(_Word):
    """What memory is for, in the order in which tables and figures show it.

    `WORKSPACES` is scratch memory of CUDA libraries and kernels. `ROUNDING` is the part of the
    allocator's blocks beyond the bytes that were requested.
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


NOBODY = "they were not estimated"  # why a measured footprint has no seconds
NOT_TENSORS = (Category.WORKSPACES, Category.ROUNDING)


class Phase(_Word):
    """The phase of a training step or of inference.

    `ZERO_GRAD` lasts from the end of the optimizer step to the next allocation.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "optimizer step"
    ZERO_GRAD = "zero_grad"
    PREFILL = "prefill"  # PREFILL and DECODE are the phases of inference (`memlab.spec.serving`)
    DECODE = "decode"
    UNKNOWN = "unknown"  # for measurements on CUDA, whose counters know no phase


@dataclass(frozen=True)
class Allocation:
    """One allocation of a step: its size, its purpose, its origin and its lifetime.

    nbytes: bytes of the tensor's storage or of the workspace.
    module: the path of the module that allocated the memory. For parameters, gradients and
        optimizer states, the module that they belong to.
    operation: PyTorch's name of the operator.
    born, died: moments of the timeline; `died` is None for memory that outlives the timeline.
    line: the line of the user's script that allocated the memory, if a script is followed.
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
    """Bytes by category after each allocation and each free, with the phase of each event.

    A moment is an index into `phases` and into each list of `levels`. Moment 0 is the state before
    the first event.

    lives: all allocations of the step.
    peak: the moment at which all categories together are largest.
    """

    phases: list[Phase]
    levels: dict[Category, list[int]]
    lives: list[Allocation] = field(default_factory=list, repr=False)
    peak: int = 0

    def spans(self) -> list[tuple[Phase, int, int]]:
        """(phase, first moment, moment after the last) of each unbroken run of one phase."""
        spans: list[tuple[Phase, int, int]] = []
        start = 0
        for i in range(1, len(self.phases) + 1):
            if i == len(self.phases) or self.phases[i] != self.phases[start]:
                spans.append((self.phases[start], start, i))
                start = i
        return spans

    def totals(self) -> list[int]:
        """Bytes of all categories together at each moment."""
        return [sum(levels) for levels in zip(*self.levels.values(), strict=True)]

    def alive(self, moment: int) -> list[Allocation]:
        """The allocations that are live at a moment, the largest first."""
        there = [
            life
            for life in self.lives
            if life.born <= moment and (life.died is None or life.died > moment)
        ]
        return sorted(there, key=lambda life: -life.nbytes)


@dataclass(frozen=True)
class StepTime:
    """An estimate of the seconds of one optimizer step on a GPU (`memlab.card.step_time`).

    low, expected, high: seconds, for programs that reach more, as much or less of the GPU's data
        sheet than is usual.
    parts: part of the step -> its seconds; they sum to `expected`. `communication` counts only the
        time that no kernels hide.
    flops: floating-point operations of all matrix products, without those that activation
        checkpointing repeats.
    peak_rate: operations per second of the fastest number format that the step multiplies in.
    samples: sequences per step; None for a user's own loop.
    sent: bytes that this rank sends to other ranks.
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
        """Model FLOPs utilization: the share of the GPU's peak rate that the model uses."""
        return self.flops / (self.expected * self.peak_rate) if self.peak_rate else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The estimate as plain JSON values."""
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
        peak.
    peak_reserved: bytes that the caching allocator has reserved on the device at most; None on a
        CPU, which has no caching allocator.
    breakdown: bytes by category at the peak; they sum to peak_allocated.
    peak_phase: the phase of the peak: `forward`, `backward` or `optimizer step`.
    parameters, trainable_parameters: counts, not bytes.
    assumptions: what was assumed, one line each; mostly values that only a real GPU has, where the
        shape of a tensor depends on them.
    context: bytes of the CUDA context; None if there is no GPU.
    device_used: bytes in use on the whole device, by all processes; None if there is no GPU.
    timeline: every allocation of the step; None if only the peak was counted.
    step_time: the estimated seconds of the step; None without an estimate.
    no_time: why there is no estimate.
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
        """The estimated seconds of the step. Raises ValueError if there is no estimate."""
        if self.step_time is None:
            raise ValueError(f"this footprint has no seconds: {self.no_time}")
        return self.step_time

    @property
    def samples_per_second(self) -> float | None:
        """Estimated sequences per second; None without an estimate and for a user's own loop."""
        return self.step_time.samples_per_second if self.step_time else None

    @property
    def peak_tensors(self) -> int:
        """Bytes of tensors at the peak, without workspaces and the allocator's rounding."""
        return self.peak_allocated - sum(self.breakdown.get(name, 0) for name in NOT_TENSORS)

    def by_line(self) -> dict[str, int]:
        """Bytes at the peak by the line of the script that allocated them, the largest first.

        Memory of CUDA libraries and of the allocator is listed as `workspaces` and `rounding`.
        Memory that no line of the script has allocated is listed under an empty name.

        Raises ValueError for a footprint without a timeline.
        """
        timeline = self._traced()
        lines: Counter[str] = Counter()
        lines[Category.ROUNDING] = timeline.levels[Category.ROUNDING][timeline.peak]
        for life in timeline.alive(timeline.peak):
            lines[life.category if life.category in NOT_TENSORS else life.line] += life.nbytes
        return {line: nbytes for line, nbytes in lines.most_common() if nbytes}

    def worst_of_each_phase(self) -> dict[Phase, int]:
        """Phase -> the most bytes held in it, in the order of the step.

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
        """The footprint as plain JSON values, without the timeline."""
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
        """(label, bytes) of each row of the printed table; empty categories are left out."""
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
