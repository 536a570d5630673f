"""Temporaries of operators that PyTorch puts together from others in C++, below the dispatcher.

A fake tensor gets the result of such an operator at once, and what C++ makes on the way is not
seen. One function per operator says it, in bytes, beside the C++ that it is read from. Operators
that Python sees taken apart need none. Of some losses the result keeps the memory of the numbers
that it is the mean of: they are computed into it, and it is then resized to a scalar.

Known limitations: temporaries below a row of the input are left out, as are those of `sort`, of
`index_put` and of the gradient of an embedding, which CUDA's libraries sort.
"""

import math
from collections.abc import Callable

import torch

NONE, MEAN = 0, 1  # torch.nn._reduction: no reduction, and that of losses where none is given
# By an operator's name: the bytes of the tensors that are there together, for each time.
TEMPORARIES: dict[str, Callable[..., list[list[int]]]] = {}
# By an operator's name: the bytes that its result holds, where they are more than its own.
KEPT: dict[str, Callable[..., int]] = {}


def _of(table, operators: str):
    def register(function):
        table.update(dict.fromkeys(operators.split(), function))
        return function

    return register


def _together(*tensors) -> int:
    """Bytes of an elementwise result."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return math.prod(shape) * dtype.itemsize


def temporaries(func, args) -> list[list[int]]:
    """Bytes of the tensors that an operator makes on the way, by the times they are together."""
    return TEMPORARIES.get(func._opname, lambda *args: [])(*args)


def kept(func, args) -> int:
    """Bytes that the result of an operator holds beside its own, as long as it lives."""
    return KEPT.get(func._opname, lambda *args: 0)(*args)


@_of(TEMPORARIES, "logsumexp")
def _logsumexp(tensor, dims, keepdim=False):
    """ReduceOps.cpp, `logsumexp_out_impl`: `sum_out(result, (self - maxes).exp_())`."""
    summed = math.prod(tensor.size(dim) for dim in dims or range(tensor.dim()))
    return [[tensor.nbytes, tensor.nbytes // max(summed, 1)]]


@_of(TEMPORARIES, "isinf")
def _isinf(tensor):
    """TensorCompare.cpp, `isinf`: `self.abs() == infinity`."""
    return [[tensor.nbytes]] if tensor.is_floating_point() else []


@_of(TEMPORARIES, "dist")
def _dist(tensor, other, p=2):
    """Distance.cpp, `dist`: `norm(self - other, p)`."""
    return [[_together(tensor, other)]]


@_of(TEMPORARIES, "huber_loss mse_loss smooth_l1_loss")
def _reduced(tensor, target, reduction=MEAN, *_):
    """Loss.cpp, `huber_loss`: each number's, then their mean.

    Of the others the meta function builds an output of full size, the implementation another.
    """
    return [] if reduction == NONE else [[_together(tensor, target)]]


@_of(KEPT, "mse_loss smooth_l1_loss soft_margin_loss")
def _resized_to_a_scalar(tensor, target, reduction=MEAN, *_):
    """Loss.cpp: `maybe_get_output().resize_({})`, `output.resize_({})`; storages do not shrink."""
    return 0 if reduction == NONE else _together(tensor, target)


@_of(KEPT, "binary_cross_entropy")
def _binary_cross_entropy(tensor, target, weight=None, reduction=MEAN):
    """cuda/Loss.cu, `binary_cross_entropy_out_cuda`: `loss.resize_as_(loss_reduced)`."""
    return _resized_to_a_scalar(tensor, target, reduction)


@_of(TEMPORARIES, "binary_cross_entropy_with_logits")
def _of_logits(tensor, target, weight=None, pos_weight=None, reduction=MEAN):
    """Loss.cpp: `log_sigmoid(input)`, then `(1 - target).mul_(input).sub_(log_sigmoid_input)`."""
    nbytes = _together(tensor, target)
    return [[nbytes] if reduction == NONE else [nbytes, nbytes]]


@_of(TEMPORARIES, "masked_scatter masked_scatter_")
def _masked_scatter(tensor, mask, source):
    """cuda/IndexKernel.cpp, `masked_scatter__cuda`: int64 sums over the mask, by element."""
    return [[tensor.numel() * torch.long.itemsize]]


@_of(TEMPORARIES, "multinomial")
def _multinomial(probabilities, samples, replacement=False):
    """Distributions.cpp, `multinomial_out`: `self / exponential`, unless many are put back."""
    return [] if replacement and samples > 1 else [[probabilities.nbytes]]


@_of(TEMPORARIES, "_euclidean_dist")
def _euclidean_dist(tensor, other):
    """Distance.cpp, `_euclidean_dist`: a product of rows with two more columns."""
    return [[x.nbytes + 2 * x.nbytes // max(x.size(-1), 1) for x in (tensor, other)]]


@_of(TEMPORARIES, "_ctc_loss_backward")
def _ctc_loss_backward(grad, log_probs, targets, input_lengths, target_lengths, nll, log_alpha, *_):
    """cuda/LossCTC.cu, `ctc_loss_backward_gpu_template`: `log_beta = empty_like(log_alpha)`."""
    return [[log_alpha.nbytes]]
