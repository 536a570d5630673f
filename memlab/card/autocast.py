"""`torch.autocast("cuda")` on tensors that PyTorch takes for CPU tensors.

It enters the CPU's autocast with CUDA's default dtype. Which operations it casts, and to what, is
the rule "autocast" of `memlab.card.kernels.saved_tensors`.
"""

import torch

_original_autocast_init = torch.autocast.__init__
_original_is_autocast_enabled = torch.is_autocast_enabled
_original_get_autocast_dtype = torch.get_autocast_dtype


def _is_autocast_enabled(device_type="cuda"):  # PyTorch's default as well
    return _original_is_autocast_enabled(device_type.replace("cuda", "cpu"))


def _get_autocast_dtype(device_type):
    return _original_get_autocast_dtype(device_type.replace("cuda", "cpu"))


def _autocast_on_cpu(self, device_type, dtype=None, enabled=True, cache_enabled=None):
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.float16  # CUDA's default; the CPU's is bf16
    _original_autocast_init(self, device_type, dtype, enabled, cache_enabled)


# Rows for `memlab.trace.patches.replaced`: (target, name, replacement).
AUTOCAST = (
    (torch.autocast, "__init__", _autocast_on_cpu),
    (torch, "is_autocast_enabled", _is_autocast_enabled),
    (torch, "get_autocast_dtype", _get_autocast_dtype),
)
