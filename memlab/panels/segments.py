"""Checkpoints and segments of a chain of equal layers: what is held at every moment of a step."""

from memlab.panels.panel import Panel

ALLOWED = {"layers": (2, 48), "segment": (0, 48), "ratio": (1, 40)}


def held(layers: int, segment: int, ratio: int) -> list[int]:
    """What is held at each moment, in checkpoints (the input of one layer).

    segment: layers between two checkpoints; 0 keeps everything. ratio: what a layer keeps for its
    backward, its input included, in checkpoints.

    A moment is one layer's forward, its second forward, or its backward. Gradients on their way
    and what an operation takes for itself are not counted.
    """
    if not segment:
        up = [n * ratio for n in range(1, layers + 1)]
        return up + up[::-1]
    firsts = range(0, layers, segment)
    # forward: one layer beside the checkpoints; the first of a segment has its checkpoint as input
    moments = [n // segment + ratio + (n % segment > 0) for n in range(layers)]
    for number, first in reversed(list(enumerate(firsts))):
        up = [number + n * ratio for n in range(1, min(segment, layers - first) + 1)]
        moments += up + up[::-1]
    return moments


def figures(layers: int, segment: int, ratio: int) -> dict[str, float]:
    """What the panel says: peak, forward, everything, passes and best.

    peak, everything: the most held, so and with everything kept; forward: when forward has ended,
    and its last layer is gone. passes: work in forward passes, a backward being two. best: the
    segment with the lowest peak, the shortest of equal ones.
    """
    segment = min(segment, layers)
    return {
        "peak": max(held(layers, segment, ratio)),
        "forward": -(-layers // segment) if segment else layers * ratio,
        "everything": layers * ratio,
        "passes": 4 if segment else 3,
        "best": min(range(1, layers + 1), key=lambda k: max(held(layers, k, ratio))),
    }


class SegmentFilm(Panel):
    """A step of a chain with checkpoints, drawn from its schedule: layers, segment, ratio.

    layers, segment, ratio: as the sliders begin; see `held`.

    Raises ValueError for what the sliders do not allow.
    """

    kind = "segments"
    still = (
        "This panel needs scripts. It draws what a chain of layers holds, with checkpoints at "
        "distances that you choose."
    )

    def __init__(self, layers: int = 16, segment: int = 4, ratio: int = 4):
        self.fields = {"layers": layers, "segment": segment, "ratio": ratio}
        for name, value in self.fields.items():
            least, most = ALLOWED[name]
            most = layers if name == "segment" else most
            if value != int(value) or not least <= value <= most:
                raise ValueError(
                    f"{name} is {value}: allowed are whole numbers from {least} to {most}"
                )

    def data(self) -> dict:
        return {"fields": self.fields, "allowed": ALLOWED}
