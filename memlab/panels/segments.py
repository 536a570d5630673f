"""Checkpoints and segments of a chain of equal layers: what is held at every moment of a step."""

from memlab.panels.panel import Panel

ALLOWED = {"layers": (2, 48), "segment": (0, 48), "ratio": (1, 40)}


class SegmentFilm(Panel):
    """A step of a chain with checkpoints, drawn from its schedule: layers, segment, ratio.

    As the sliders begin: layers; segment: layers between two checkpoints, 0 keeps everything;
    ratio: what a layer keeps for its backward, its input included, in checkpoints.
    """

    kind = "segments"
    still = (
        "This panel needs scripts. It draws what a chain of layers holds, with checkpoints at "
        "distances that you choose."
    )

    def __init__(self, layers: int = 16, segment: int = 4, ratio: int = 4):
        self.fields = {"layers": layers, "segment": segment, "ratio": ratio}

    def data(self) -> dict:
        return {"fields": self.fields, "allowed": ALLOWED}
