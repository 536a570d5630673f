"""Whether somebody has changed the code of a model, as a notebook or a library of kernels does."""

from __future__ import annotations

import inspect
import sys

from memlab import models
from memlab.libraries import remembered

# Beside the module of the model itself.
SHARED = ("transformers.integrations.sdpa_attention", "transformers.masking_utils")
# Whose functions are found in those modules by themselves.
THEIRS = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub", "safetensors"}
THEIRS = THEIRS - {"__main__"} | {"numpy", "typing_extensions"}


@remembered
def _modules(model, task: str) -> list[str]:
    """The Python modules that the classes of a model's modules come from."""
    import torch

    with torch.device("meta"):
        built = models.build(models.with_layers(model, 1), task)
    return sorted({type(module).__module__ for module in built.modules()})


def has_changed_code(model, task: str) -> bool:
    """Whether functions or methods of a model's modules come from outside of its libraries.

    A trace that is kept knows nothing of these, so such a model is run as it is. What is not
    imported yet nobody has changed.
    """
    names = *SHARED, *_modules(model, task)
    for module in [sys.modules[name] for name in names if name in sys.modules]:
        for value in vars(module).values():
            functions = [value, *(vars(value).values() if inspect.isclass(value) else ())]
            if any(inspect.isfunction(one) and _is_foreign(one) for one in functions):
                return True
    return False


def _is_foreign(function) -> bool:
    return (function.__module__ or "").partition(".")[0] not in THEIRS
