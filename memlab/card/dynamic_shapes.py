"""The largest possible output of operations whose output shape follows from unknown values.

One function per operator. It takes the operator's arguments and returns meta tensors of the largest
shapes, with the assumption for `Footprint.assumptions`, which is empty if nothing is assumed.
Operators without a largest shape raise NotSimulated: bincount without minlength, repeat_interleave
without output_size. Some operators are here for another reason, such as the kernels of
SyncBatchNorm, for which PyTorch has no meta kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from memlab.card.known_values import values_of
from memlab.card.placement import NotSimulated

aten = torch.ops.aten


def largest(func, args, kwargs) -> tuple:
    """(results on `meta`, assumption) of an operation whose output shape follows from values.

    Raises NotSimulated if the input shapes do not bound the output.
    """
    with no_dispatch():
        return LARGEST[func](*args, **kwargs)


def _long(*shape):
    return torch.empty(shape, dtype=torch.long, device="meta")


def _like(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _nonzero(tensor):
    assumption = (
        "nonzero and boolean masks: where values are not known, every element counts as true"
    )
    return _long(tensor.numel(), tensor.dim()), assumption  # one row of indices per element


def _unique(tensor, sorted=True, return_inverse=False, return_counts=False):
    n = tensor.numel()
    inverse = _long(*tensor.shape) if return_inverse else _long(0)  # PyTorch returns empty ones
    flat = torch.empty(n, dtype=tensor.dtype, device="meta")
    return (flat, inverse, _long(n if return_counts else 0)), EACH_ONCE


def _unique_along(tensor, dim, sorted=True, return_inverse=False, return_counts=False):
    n = tensor.size(dim)
    inverse, counts = _long(n if return_inverse else 0), _long(n if return_counts else 0)
    return (_like(tensor), inverse, counts), EACH_ONCE


def _unique_consecutive(tensor, return_inverse=False, return_counts=False, dim=None):
    if dim is None:
        return _unique(tensor, True, return_inverse, return_counts)
    return _unique_along(tensor, dim, True, return_inverse, return_counts)


EACH_ONCE = "unique: where values are not known, every one counts as different"


def _bincount(tensor, weights=None, minlength=0):
    if not minlength:
        raise NotSimulated(
            "torch.bincount of values that only a real card has: the number of bins depends on "
            "them. Give minlength, which is then used"
        )
    # Counts are int64, sums of weights fp64, and fp32 for fp32 weights.
    dtype = torch.long if weights is None else torch.float64
    if weights is not None and weights.dtype == torch.float32:
        dtype = torch.float32
    assumption = "bincount: where values are not known, there are minlength bins"
    return torch.empty(minlength, dtype=dtype, device="meta"), assumption


def _repeat_interleave(repeats, *, output_size=None):
    if output_size is None:
        raise NotSimulated(
            "torch.repeat_interleave with repeats that only a real card has: the length of the "
            "result depends on them. Give output_size, or make repeats on the host"
        )
    return _long(output_size), ""


def _histc(tensor, bins=100, min=0, max=0):
    return torch.empty(bins, dtype=tensor.dtype, device="meta"), ""


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """(loss [batch], log_alpha [batch, time, states]), aten/src/ATen/native/cuda/LossCTC.cu.

    The states are the tokens of the longest target, with a blank before, after and between them.
    """
    if isinstance(target_lengths, torch.Tensor):
        lengths = values_of(target_lengths)
        target_lengths = None if lengths is None else lengths.tolist()
    assumption = ""
    if target_lengths is None:
        target_lengths = [targets.size(1) if targets.dim() == 2 else targets.numel()]
        assumption = "CTC loss: where the lengths of targets are not known, they are the longest"
    steps, batch = log_probs.shape[:2] if log_probs.dim() == 3 else (log_probs.size(0), 1)
    states = 2 * max(target_lengths, default=0) + 1  # n tokens, n + 1 blanks
    options = {"dtype": log_probs.dtype, "device": "meta"}
    loss = torch.empty(log_probs.shape[1:-1], **options)
    return (loss, torch.empty(batch, steps, states, **options)), assumption


def _ctc_loss_backward(grad, log_probs, *_):
    return _like(log_probs), ""


# The kernels of SyncBatchNorm (aten/src/ATen/native/cuda/Normalization.cu). PyTorch has no meta
# kernels for them.


def _per_channel(tensor, *_):
    """Mean and inverse standard deviation, [channels] each: fp32 for input in half precision."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return [torch.empty(tensor.size(1), dtype=dtype, device="meta") for _ in range(2)], ""


def _normalized(tensor, *_):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), ""


def _sums_per_channel(grad, tensor, mean, invstd, weight, *_):
    # sum_dy and sum_dy_xmu, then the gradients of weight and bias
    sums = (mean, mean, *2 * [mean if weight is None else weight])
    return [_like(tensor) for tensor in sums], ""


LARGEST: dict[Any, Callable[..., tuple]] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten.batch_norm_stats.default: _per_channel,
    aten.batch_norm_gather_stats_with_counts.default: _per_channel,
    aten.batch_norm_elemt.default: _normalized,
    aten.batch_norm_backward_reduce.default: _sums_per_channel,
    aten.batch_norm_backward_elemt.default: lambda grad, tensor, *_: _normalized(tensor),
    aten.histc.default: _histc,
    aten.nonzero.default: _nonzero,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique_along,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat_interleave,
}
# Operations whose second argument, the list of indices, may contain boolean masks.
BY_MASK = set("index _unsafe_index index_put index_put_ _index_put_impl_".split())
