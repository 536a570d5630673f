"""The panel on activation checkpointing: what a chain of equal layers holds during a step."""

from memlab.panels.panel import Panel

ALLOWED = {"layers": (2, 48), "segment": (0, 48), "ratio": (1, 40)}


class SegmentFilm(Panel):
    """One step of a chain of layers with checkpoints, drawn from its schedule.

    The arguments are the first positions of the sliders.

    layers: the number of layers.
    segment: layers between two checkpoints; 0 keeps all activations.
    ratio: the memory that a layer keeps for its backward pass, input included, in units of one
        checkpoint.
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
