"""What a training step holds at its worst moment: bytes inside, MiB in print."""

from __future__ import annotations

from dataclasses import dataclass, field

MiB = 2**20

# The order in which they are printed and drawn. `workspaces` is memory that CUDA libraries and
# kernels take for themselves; `rounding` is what the allocator's blocks have over the tensors.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "temporary",
    "inputs",
    "buffers",
    "workspaces",
    "rounding",
)
NOT_TENSORS = ("workspaces", "rounding")


@dataclass(frozen=True)
class Timeline:
    """Bytes by category after each birth or death, and the phase each one happened in."""

    phases: list[str]
    levels: dict[str, list[int]]

    def spans(self) -> list[tuple[str, int, int]]:
        """(phase, first event, event after the last) of each unbroken stretch."""
        spans, start = [], 0
        for i in range(1, len(self.phases) + 1):
            if i == len(self.phases) or self.phases[i] != self.phases[start]:
                spans.append((self.phases[start], start, i))
                start = i
        return spans


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
    context: bytes of the CUDA context; device_used: bytes in use on the whole device, by all
        processes; None where the machine has none.
    """

    peak_allocated: int
    peak_reserved: int | None
    breakdown: dict[str, int]
    peak_phase: str
    parameters: int | None = None
    trainable_parameters: int | None = None
    context: int | None = None
    device_used: int | None = None
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @property
    def peak_tensors(self) -> int:
        """Bytes of tensors at the peak, without the allocator's rounding and workspaces."""
        return self.peak_allocated - sum(self.breakdown.get(name, 0) for name in NOT_TENSORS)

    def as_dict(self) -> dict:
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
        return "\n".join(f"{label:<{width}}  {mib(n):>12}" for label, n in rows)


def mib(nbytes: int | None) -> str:
    """Bytes as text in MiB (2**20 bytes), one decimal; an em dash for None."""
    return "—" if nbytes is None else f"{nbytes / MiB:,.1f} MiB"
