"""How many bytes each CUDA rule changes, against the CPU's own kernels."""

from dataclasses import dataclass

from memlab.card.device import SimulatedGPU
from memlab.card.kernels.rules import RULES
from memlab.footprint import Category
from memlab.gpus import GPU
from memlab.predict.run import two_steps
from memlab.spec.recipe import Recipe
from memlab.workloads.training import import_libraries

LIBRARIES = "PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp"
BLOCKS = "PyTorch, c10/cuda/CUDACachingAllocator.cpp"


@dataclass(frozen=True)
class Change:
    """What a rule adds to the peak (or takes from it), in bytes, and where it is written down."""

    rule: str
    nbytes: int
    source: str


def changed_bytes(recipe: Recipe, gpu: GPU | str | int | None = None) -> list[Change]:
    """From the peak with the CPU's kernels to the peak allocated on a card, rule by rule.

    The first row is the tensors at the peak with no rule at all. Each further one is what a rule
    of `memlab.card.kernels.rules.RULES` changes on top of those before it, 0 for one that the
    recipe does not meet; then the libraries' workspaces, and what the allocator's blocks have over.
    The rows sum to `peak_allocated`. Every rule that is met takes a simulation at full depth.
    """
    import_libraries(recipe)
    whole, met = _run(recipe, gpu, frozenset(RULES))
    before = first = _run(recipe, gpu, frozenset())[0].peak_tensors
    rows, rules = [Change("the CPU's kernels", first, "")], set()
    for rule, source in RULES.items():
        after = before
        if rule in met:
            rules.add(rule)
            after = _run(recipe, gpu, frozenset(rules))[0].peak_tensors
        rows.append(Change(rule, after - before, source))
        before = after
    workspaces = whole.breakdown[Category.WORKSPACES]
    rows.append(Change("workspaces", workspaces, LIBRARIES))
    rows.append(Change("rounding", whole.peak_allocated - before - workspaces, BLOCKS))
    return rows


def _run(recipe, gpu, rules):
    """The footprint of the second step, and the rules that were met."""
    with SimulatedGPU(gpu, rules) as simulated:
        two_steps(recipe, simulated)
    return simulated.footprint, simulated.tracer.met_rules
