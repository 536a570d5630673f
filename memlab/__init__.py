"""memlab: predict, measure and explain the GPU memory of training transformers."""

from memlab.exercise import check
from memlab.footprint import Footprint
from memlab.formula import formula
from memlab.measure import Measurement, Meter, measure
from memlab.recipe import Recipe
from memlab.show import compare
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
