"""memlab: predict, measure and explain the GPU memory of training transformers."""

from memlab.exercise import check
from memlab.footprint import Footprint
from memlab.formula import formula
from memlab.measure import Measurement, Meter, measure
from memlab.recipe import Recipe
from memlab.simulate import SimulatedGPU, simulate

__all__ = [
    "Footprint",
    "Measurement",
    "Meter",
    "Recipe",
    "SimulatedGPU",
    "check",
    "compare",
    "formula",
    "measure",
    "simulate",
]


def __getattr__(name):
    """`compare` brings matplotlib and pandas along, so it is loaded by whoever asks for it."""
    if name == "compare":
        from memlab.show import compare

        return compare
    raise AttributeError(f"module 'memlab' has no attribute {name!r}")
