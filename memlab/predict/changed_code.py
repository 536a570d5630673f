"""Whether somebody has changed the code of a model, as a notebook or a library of kernels does."""

from __future__ import annotations

import importlib
import inspect
import sys

import torch

from memlab import models

# Beside the module of the model itself.
SHARED = ("transformers.integrations.sdpa_attention", "transformers.masking_utils")
# Whose functions are found in those modules by themselves.
THEIRS = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub", "safetensors"}
THEIRS = THEIRS - {"__main__"} | {"numpy", "typing_extensions"}


_MODULES: dict[tuple[str, str], list[str]] = {}  # those of a model's modules, by config and task


def has_changed_code(model, task: str) -> bool:
    """Whether functions or methods of a model's modules come from outside of its libraries.

    A trace that is kept knows nothing of these, so such a model is run as it is.
    """
    config = models.with_layers(model, 1)
    key = config.to_json_string(use_diff=False), task
    if key not in _MODULES:
        with torch.device("meta"):
            built = models.build(config, task)
        _MODULES[key] = sorted({type(module).__module__ for module in built.modules()})
    for name in (*SHARED, *_MODULES[key]):
        for value in vars(importlib.import_module(name)).values():
            functions = [value, *(vars(value).values() if inspect.isclass(value) else ())]
            if any(inspect.isfunction(one) and _is_foreign(one) for one in functions):
                return True
    return False


def _is_foreign(function) -> bool:
    return (function.__module__ or "").partition(".")[0] not in THEIRS
