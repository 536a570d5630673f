"""Triton's kernels on a card that is not there: their results have stand-ins."""

import contextlib
import importlib
import importlib.util
import sys

from memlab.trace.patches import replaced

ASSUMED = "Triton kernels only write into the tensors they are given; their seconds are not counted"


@contextlib.contextmanager
def nothing_is_compiled(assumptions: dict):
    """Let a launch of a Triton kernel return at once, where Triton is installed.

    assumptions: gets what is assumed of the first one. A kernel takes no memory from PyTorch's
    allocator; what it writes into was made before. Without Triton, which is no part of PyTorch's
    builds without CUDA, libraries that ask for it take another way, with memory of its own.
    """

    def launch(*args, **kwargs):
        assumptions[ASSUMED] = None

    rows = []
    if importlib.util.find_spec("triton"):
        for module, name in (("jit", "JITFunction"), ("autotuner", "Autotuner")):
            kind = getattr(importlib.import_module(f"triton.runtime.{module}"), name)
            rows.append((kind, "run", launch))
    with replaced(*rows):
        yield


def without_triton() -> tuple[str, ...]:
    """What is assumed where a library that is imported would take Triton, which is not installed.

    TRL's losses: their way in PyTorch makes more tensors, and scores every position.
    """
    if importlib.util.find_spec("triton") or "trl.kernels" not in sys.modules:
        return ()
    return (
        "Triton is not installed here: TRL's losses take their way in PyTorch, in which whole "
        "trainings took up to 9 % more than with Triton's kernels, as on a card",
    )
