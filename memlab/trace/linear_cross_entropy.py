"""torch.nn.functional.linear_cross_entropy, as the products and buffers that it is made of.

To PyTorch's dispatcher it is one operator, which shows what it gives and hides what it takes while
it runs. It is written in Python (torch/nn/modules/linear_cross_entropy.py), and that code runs here
where a tracer sees it, on the same tensors in the same order.
"""

import contextlib
from typing import Any

import torch

from memlab.trace.patches import dispatched

_module: Any = None
try:
    from torch.nn.modules import linear_cross_entropy as _module
except ImportError:  # before PyTorch 2.13
    _module = None

KEYS = ("AutogradCPU", "AutogradCUDA")


class _InParts(torch.autograd.Function):
    """The operator, with PyTorch's own forward pass, backward pass and what it keeps.

    As there (torch/_library/autograd.py), the backward pass is given zeros for the gradients of the
    other results, which are the gradients of input and weight themselves.
    """

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *given, _, of_input, of_weight, of_bias = inputs
        accumulate = _module._linear_cross_entropy_batch_chunked_accumulator
        return accumulate(*given, of_input, of_weight, of_bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _module._linear_cross_entropy_batch_chunked_setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _module._linear_cross_entropy_batch_chunked_backward(ctx, *grads)


def seen_in_parts() -> contextlib.AbstractContextManager[None]:
    """Let the operator run where modes see what it does."""
    name, keys = "_linear_cross_entropy_batch_chunked", KEYS if _module else ()
    return dispatched(("torch_nn", name, lambda *a: _InParts.apply(*a), key) for key in keys)
