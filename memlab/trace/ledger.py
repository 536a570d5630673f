"""The log of births and deaths, and what can be read from it: peak, breakdown, timeline."""

from __future__ import annotations

from memlab.footprint import CATEGORIES, Footprint, Life, Timeline

FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"
ZERO_GRAD = "zero_grad"  # after a step, until the next tensor is born


class EventLog:
    """Storages by number: how large, what for, made by what, and when they came and went.

    allocator: a `memlab.allocator.CachingAllocator` that serves every birth and death as it
        happens, or None to count the tensors' own bytes.

    A subclass says what is going on at each event: `_phase`, `_module` and `_maker`.
    """

    def __init__(self, allocator=None):
        self.allocator = allocator
        self.sizes: list[int] = []
        self.categories: list[str] = []
        self.makers: list = []  # the operation that made each storage
        self.modules: list[str] = []
        # One entry an event: (change in bytes, storage number, phase, allocated, reserved).
        self.events: list[tuple[int, int, str, int, int]] = []
        self._start = 0  # the event from which peaks count
        self._allocated = 0
        self._before = 0  # bytes that existed before the first event
        self.addresses: dict[int, int] = {}  # of what lives
        self._maker = None

    def reset_peak(self) -> None:
        """Begin a new measured stretch, as `torch.cuda.reset_peak_memory_stats` does."""
        self._start = len(self.events)
        if self.allocator is not None:
            self.allocator.reset_peak_stats()

    def peak(self) -> tuple[int, int, str, int]:
        """(allocated bytes, reserved bytes, phase, number of the event) since `reset_peak`."""
        start = self._start
        peak, reserved, phase, index = self._before, 0, FORWARD, start - 1
        if start:
            peak, reserved = self.events[start - 1][3] + self._before, self.events[start - 1][4]
        for i in range(start, len(self.events)):
            _, _, now, allocated, held = self.events[i]
            if allocated + self._before > peak:
                peak, phase, index = allocated + self._before, now, i
            reserved = max(reserved, held)
        return peak, reserved, phase, index

    def footprint(self) -> Footprint:
        """The peak since the last `reset_peak`, by category."""
        start = self._start
        peak, peak_reserved, phase, index = self.peak()
        breakdown = self._breakdown(index)
        if self.allocator is not None:
            breakdown["rounding"] = peak - sum(breakdown.values())
        return Footprint(
            peak_allocated=peak,
            peak_reserved=peak_reserved if self.allocator is not None else None,
            breakdown=breakdown,
            peak_phase=phase,
            timeline=self._timeline(start),
        )

    # ------------------------------------------------------------------ the log

    def _birth(self, nbytes, category) -> int:
        number = len(self.sizes)
        if self.allocator is not None:
            self.addresses[number] = self.allocator.allocate(nbytes)
        self._describe(nbytes, category)
        self._log(nbytes, number)
        return number

    def _describe(self, nbytes, category) -> None:
        self.sizes.append(nbytes)
        self.categories.append(category)
        self.makers.append(self._maker)
        self.modules.append(self._module())

    def _death(self, number) -> None:
        if self.allocator is not None:
            self.allocator.free(self.addresses.pop(number))
        self._log(-self.sizes[number], number)

    def _log(self, change, number) -> None:
        self._allocated += change
        allocated, reserved = self._allocated, 0
        if self.allocator is not None:
            allocated, reserved = self.allocator.allocated, self.allocator.reserved
        phase = self._phase()
        # What dies after the backward pass, its graph, is the end of it; a birth begins a forward.
        if change < 0 and phase == FORWARD and self.events and self.events[-1][2] == BACKWARD:
            phase = BACKWARD
        self.events.append((change, number, phase, allocated, reserved))

    # ------------------------------------------------------------------ analysis

    def _floor(self) -> dict[str, int]:
        """Bytes by category of what existed before the first event."""
        floor = dict.fromkeys(CATEGORIES, 0)
        born = {number for change, number, *_ in self.events if change > 0}
        for number, size in enumerate(self.sizes):
            if number not in born:
                floor[self.categories[number]] += size
        return floor

    def _breakdown(self, index) -> dict[str, int]:
        breakdown = self._floor()
        for change, number, *_ in self.events[: index + 1]:
            breakdown[self.categories[number]] += change
        return breakdown

    def _timeline(self, start) -> Timeline:
        levels = self._breakdown(start - 1)
        steps = [dict(levels)]
        phases = [self.events[start][2] if start < len(self.events) else FORWARD]
        served = [self.events[start - 1][3] if start else 0]
        for change, number, phase, allocated, _ in self.events[start:]:
            levels[self.categories[number]] += change
            steps.append(dict(levels))
            phases.append(phase)
            served.append(allocated)
        if self.allocator is not None:
            for step, allocated in zip(steps, served, strict=True):
                step["rounding"] = allocated - sum(step.values())
        levels = {name: [step[name] for step in steps] for name in CATEGORIES}
        return Timeline(phases, levels, self._lives(start), self.peak()[3] - start + 1)

    def _lives(self, start) -> list[Life]:
        """Everything that lived from the event `start` on, in the order of birth."""
        born, died = dict.fromkeys(range(len(self.sizes)), 0), {}
        for moment, (change, number, *_) in enumerate(self.events, start=1 - start):
            (born if change > 0 else died)[number] = max(0, moment)
        return [
            Life(
                self.sizes[number],
                self.categories[number],
                self.modules[number],
                operation_name(self.makers[number]),
                born[number],
                died.get(number),
            )
            for number in born
            if died.get(number) != 0
        ]


def operation_name(maker) -> str:
    """`aten.mm`, in PyTorch's words."""
    return str(maker.overloadpacket) if maker is not None else "made before"
