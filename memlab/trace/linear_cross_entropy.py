"""torch.nn.functional.linear_cross_entropy, as the matrix products and buffers that it consists of.

To PyTorch's dispatcher it is a single custom operator: a dispatch mode does not see the buffers
that it allocates while it runs. The operator is written in Python
(torch/nn/modules/linear_cross_entropy.py). Here that code runs under the tracer, on the same
tensors in the same order.

Known limitation: only reductions to a scalar are covered, not `reduction="none"`, which has an
operator of its own.
"""

import contextlib
from typing import Any

import torch

from memlab.trace.patches import dispatched

_module: Any = None
try:
    from torch.nn.modules import linear_cross_entropy as _module
except ImportError:  # PyTorch before 2.13
    _module = None

KEYS = ("AutogradCPU", "AutogradCUDA")


class _InParts(torch.autograd.Function):
    """The operator with PyTorch's own forward, `setup_context` and backward functions.

    Besides the loss, it returns the gradients of input, weight and bias, computed in the forward
    pass. As in `make_autograd_impl` (torch/_library/autograd.py), the backward pass gets zeros for
    the gradients of these outputs.
    """

    @staticmethod
    def forward(*inputs: Any) -> Any:
        # The operator has one argument more than the function: `allow_retain_graph`, which only
        # the backward pass reads.
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
    """Let the operator run as Python code above the dispatch modes, which then see its parts.

    Nothing is replaced in PyTorch before 2.13, which does not have it.
    """
    # At the autograd keys, because modes only see what is dispatched below them.
    name, keys = "_linear_cross_entropy_batch_chunked", KEYS if _module else ()
    return dispatched(("torch_nn", name, lambda *a: _InParts.apply(*a), key) for key in keys)
