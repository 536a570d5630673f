"""Whether somebody has changed the code of a model, as a notebook or a library of kernels does."""

from __future__ import annotations

from memlab import models
from memlab.libraries import changed, remembered
from memlab.models import Model


@remembered
def _modules(model: Model, task: str) -> list[str]:
    """The Python modules that the classes of a model's modules come from."""
    import torch

    with torch.device("meta"):
        built = models.build(models.with_layers(model, 1), task)
    return sorted({type(module).__module__ for module in built.modules()})


def has_changed_code(model: Model, task: str) -> bool:
    """Whether functions or methods of a model's modules come from outside of its libraries.

    A trace that is kept knows nothing of these, so such a model is run as it is.
    """
    return changed(_modules(model, task))
