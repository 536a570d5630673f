"""Triton kernels on the simulated GPU: launches return at once, and nothing is compiled."""

import contextlib
import importlib
import importlib.util
import sys

from memlab.trace.patches import replaced

ASSUMED = "Triton kernels only write into the tensors they are given; their seconds are not counted"


@contextlib.contextmanager
def nothing_is_compiled(assumptions: dict):
    """Let every launch of a Triton kernel return at once, if Triton is installed.

    A kernel takes no memory from PyTorch's allocator: the tensors that it writes exist before the
    launch. What they hold afterwards is a stand-in, as all values on the GPU are. assumptions: a
    dict that gets a line at the first launch.

    Known limitations: the time of the kernels is not counted. PyTorch's CPU builds come without
    Triton; libraries that look for it then take another code path, with memory of its own.
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
    """A line for each imported library that would use Triton, if Triton is not installed.

    TRL is the only such library: without Triton, its losses allocate more tensors, and they compute
    the log-probabilities of masked positions too.
    """
    if importlib.util.find_spec("triton") or "trl.kernels" not in sys.modules:
        return ()
    return (
        "Triton is not installed here: TRL's losses use their PyTorch code, with which whole "
        "trainings took up to 9 % more than with the Triton kernels used on a card",
    )
