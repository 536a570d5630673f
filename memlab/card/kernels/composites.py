"""Temporaries of operators that PyTorch composes of other operators in C++.

A dispatch mode sees such an operator once, so a fake tensor gets its result without the tensors
that C++ allocates on the way. Two registries give their bytes, one function per operator, each next
to the C++ that it was read from. Operators that reach the dispatch mode decomposed need no entry.

- `TEMPORARIES`: tensors that are freed before the operator returns.
- `KEPT`: bytes that the result holds beyond its own size. Some losses compute one value per element
  into the output tensor and then resize it to a scalar; resizing does not shrink the storage.

Paths below are relative to aten/src/ATen/native.

Known limitations: temporaries smaller than a row of the input are left out. So are those of `sort`,
of `index_put` and of the gradient of an embedding, which CUDA's libraries sort.
"""

import math
from collections.abc import Callable

import torch

NONE, MEAN = 0, 1  # torch.nn._reduction: no reduction, and the default of the losses
# Operator name -> function of the operator's arguments. Its result is a list of groups: the tensors
# of one group are alive together, and are freed before the next group is allocated.
TEMPORARIES: dict[str, Callable[..., list[list[int]]]] = {}
# Operator name -> function of the operator's arguments: extra bytes in the result's storage.
KEPT: dict[str, Callable[..., int]] = {}


def _of(table, operators: str):
    def register(function):
        table.update(dict.fromkeys(operators.split(), function))
        return function

    return register


def _together(*tensors) -> int:
    """Bytes of the result of an elementwise operation: broadcast shape, promoted dtype."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return math.prod(shape) * dtype.itemsize


def temporaries(func, args) -> list[list[int]]:
    """Bytes of an operator's temporaries, as groups of tensors that are alive together."""
    return TEMPORARIES.get(func._opname, lambda *args: [])(*args)


def kept(func, args) -> int:
    """Bytes that an operator's result holds beyond its own size, for as long as it lives."""
    return KEPT.get(func._opname, lambda *args: 0)(*args)


@_of(TEMPORARIES, "logsumexp")
def _logsumexp(tensor, dims, keepdim=False):
    """ReduceOps.cpp, `logsumexp_out_impl`: `sum_out(result, (self - maxes).exp_())`."""
    summed = math.prod(tensor.size(dim) for dim in dims or range(tensor.dim()))
    return [[tensor.nbytes, tensor.nbytes // max(summed, 1)]]  # the difference, maxes


@_of(TEMPORARIES, "isinf")
def _isinf(tensor):
    """TensorCompare.cpp, `isinf`: `self.abs() == infinity`; integers get zeros at once."""
    return [[tensor.nbytes]] if tensor.is_floating_point() else []


@_of(TEMPORARIES, "dist")
def _dist(tensor, other, p=2):
    """ReduceOps.cpp, `dist`: `norm(self - other, p)`."""
    return [[_together(tensor, other)]]


@_of(TEMPORARIES, "huber_loss mse_loss smooth_l1_loss")
def _reduced(tensor, target, reduction=MEAN, *_):
    """Loss.cpp, `huber_loss`: one value per element, then `apply_loss_reduction`.

    `mse_loss` and `smooth_l1_loss` are structured kernels: the meta function builds an output of
    full size (see `KEPT`), and the implementation computes into another tensor of that size.
    """
    return [] if reduction == NONE else [[_together(tensor, target)]]


@_of(KEPT, "mse_loss smooth_l1_loss soft_margin_loss")
def _resized_to_a_scalar(tensor, target, reduction=MEAN, *_):
    """Loss.cpp: `maybe_get_output().resize_({})`, `output.resize_({})`.

    `resize_` sets the sizes alone, so the scalar keeps the storage of one value per element.
    """
    return 0 if reduction == NONE else _together(tensor, target)


@_of(KEPT, "binary_cross_entropy")
def _binary_cross_entropy(tensor, target, weight=None, reduction=MEAN):
    """cuda/Loss.cu, `binary_cross_entropy_out_cuda`: `loss.resize_as_(loss_reduced)`."""
    return _resized_to_a_scalar(tensor, target, reduction)


@_of(TEMPORARIES, "binary_cross_entropy_with_logits")
def _of_logits(tensor, target, weight=None, pos_weight=None, reduction=MEAN):
    """Loss.cpp: `log_sigmoid(input)`, then `(1 - target).mul_(input).sub_(log_sigmoid_input)`."""
    nbytes = _together(tensor, target)
    # Without a reduction the second tensor is the result itself.
    return [[nbytes] if reduction == NONE else [nbytes, nbytes]]


@_of(TEMPORARIES, "masked_scatter masked_scatter_")
def _masked_scatter(tensor, mask, source):
    """cuda/IndexKernel.cpp, `masked_scatter__cuda`: `maskPrefixSum`, an int64 per element."""
    return [[tensor.numel() * torch.long.itemsize]]


@_of(TEMPORARIES, "multinomial")
def _multinomial(probabilities, samples, replacement=False):
    """Distributions.cpp, `multinomial_out`: `q = empty_like(self).exponential_(1)`.

    Several samples with replacement take `multinomial_with_replacement_stub` instead.
    """
    return [] if replacement and samples > 1 else [[probabilities.nbytes]]


@_of(TEMPORARIES, "_euclidean_dist")
def _euclidean_dist(tensor, other):
    """Distance.cpp, `_euclidean_dist`: a product of copies that have two more columns each.

    `cat({x1.mul(-2), x1_norm, x1_pad})` with `cat({x2, x2_pad, x2_norm})`.
    """
    return [[x.nbytes + 2 * x.nbytes // max(x.size(-1), 1) for x in (tensor, other)]]


@_of(TEMPORARIES, "_ctc_loss_backward")
def _ctc_loss_backward(grad, log_probs, targets, input_lengths, target_lengths, nll, log_alpha, *_):
    """cuda/LossCTC.cu, `ctc_loss_backward_gpu_template`: `log_beta = empty_like(log_alpha)`."""
    return [[log_alpha.nbytes]]
