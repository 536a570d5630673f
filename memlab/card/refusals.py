"""Errors that CUDA kernels raise and fake tensors do not: wrong dtypes, indices out of range.

One function per operator repeats a check of its CUDA kernel, with PyTorch's message. Paths in the
docstrings are relative to aten/src/ATen/native.

Known limitations: indices are checked only if their values are known
(`memlab.card.known_values`). The error is raised at once, where a real GPU reports it at the next
synchronization.
"""

from collections.abc import Callable

import torch
from torch.utils._mode_utils import no_dispatch

from memlab.card.known_values import values_of

CHECKS: dict[str, Callable[..., None]] = {}  # operator name -> function of (operator, *arguments)
HALF = (torch.float16, torch.bfloat16)
# aten/src/ATen/autocast_mode.h, the `banned` function for binary_cross_entropy. CUDA alone has it.
UNSAFE_TO_AUTOCAST = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using "
    "torch.nn.functional.binary_cross_entropy_with_logits\nor torch.nn.BCEWithLogitsLoss."
)
# dtype -> its names in PyTorch's messages, as a `ScalarType` and as a `TypeMeta`, C++'s type name.
SCALARS = {
    torch.float32: ("Float", "float"),
    torch.float16: ("Half", "c10::Half"),
    torch.bfloat16: ("BFloat16", "c10::BFloat16"),
    torch.float64: ("Double", "double"),
    torch.int64: ("Long", "long int"),
    torch.int32: ("Int", "int"),
    torch.int8: ("Char", "signed char"),
    torch.float8_e4m3fn: ("Float8_e4m3fn", "c10::Float8_e4m3fn"),
    torch.float8_e5m2: ("Float8_e5m2", "c10::Float8_e5m2"),
}


def _checks(operators: str):
    def register(function):
        CHECKS.update(dict.fromkeys(operators.split(), function))
        return function

    return register


def refuse(func, args) -> None:
    """Raise the error that the operator's CUDA kernel raises for these arguments, if any."""
    if func.namespace in ("aten", "torch_attn") and func._opname in CHECKS:
        CHECKS[func._opname](func, *args)


def scalar(tensor) -> str:
    """The name of a tensor's dtype as a `ScalarType`, such as "Half"."""
    return SCALARS.get(tensor.dtype, (str(tensor.dtype),))[0]


def meta_type(tensor) -> str:
    """The name of a tensor's dtype as a `TypeMeta`, such as "c10::Half"."""
    return SCALARS.get(tensor.dtype, (str(tensor.dtype),))[-1]


# ---------------------------------------------------------------------- dtypes


@_checks("mm")
def _mm(func, mat1, other, *_):
    """cuda/Blas.cpp, `addmm_out_cuda_impl`."""
    if mat1.dtype != other.dtype:
        types = f"{meta_type(mat1)} != {meta_type(other)}"
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {types}")
    _multiplies("addmm_cuda", mat1)


def _multiplies(kernel, tensor) -> None:
    """cuda/Blas.cpp, `AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2(kHalf, kBFloat16, ...)`."""
    # Integers and the 8-bit floating-point formats are not among these types.
    if tensor.itemsize == 1 or not (tensor.is_floating_point() or tensor.is_complex()):
        raise RuntimeError(f'"{kernel}" not implemented for {scalar(tensor)!r}')


@_checks("addmm addmm_")
def _addmm(func, added, mat1, other, *out_dtype):
    """LinearAlgebra.cpp, `ADDMM_META`."""
    if out_dtype:  # the overload with a dtype for the result, which the summand may have instead
        return
    for name, tensor in (("self", added), ("mat1", mat1)):
        if tensor.dtype != other.dtype:
            types = f"{scalar(tensor)} and {scalar(other)}"
            raise RuntimeError(f"{name} and mat2 must have the same dtype, but got {types}")
    _multiplies("addmm_cuda", mat1)


@_checks("bmm mv cross linalg_cross")
def _of_the_first(func, first, other, *_):
    """ATen/core/TensorBase.h, `data_ptr<T>`: a kernel for the first tensor's dtype reads both."""
    if other.dtype != first.dtype:
        raise RuntimeError(f"expected scalar type {scalar(first)} but found {scalar(other)}")
    if func._opname == "bmm":
        _multiplies("baddbmm_cuda", first)


@_checks("native_layer_norm")
def _layer_norm(func, tensor, shape, *affine_and_eps):
    """cuda/layer_norm_kernel.cu, `LayerNormKernelImplInternal`: `data_ptr<T>` of the weights."""
    for other in affine_and_eps[:2]:
        if other is not None:
            _of_the_first(func, tensor, other)


@_checks("native_group_norm")
def _group_norm(func, tensor, *affine_and_sizes):
    """cuda/group_norm_kernel.cu, `GroupNormKernelImplInternal`: `data_ptr<T>` of the weights."""
    _layer_norm(func, tensor, None, *affine_and_sizes)


@_checks("binary_cross_entropy")
def _binary_cross_entropy(func, chances, target, *_):
    """cuda/Loss.cu, `binary_cross_entropy_out_cuda`: a TensorIterator whose dtypes must agree."""
    if target.dtype != chances.dtype:
        raise RuntimeError(f"Found dtype {scalar(target)} but expected {scalar(chances)}")


@_checks("convolution")
def _convolution(func, tensor, weight, *_):
    """Convolution.cpp, `check_input_same_type_as_parameters`; the bias was checked before."""
    if tensor.dtype != weight.dtype:
        types = [f"torch.cuda.{scalar(x)}Tensor" for x in (tensor, weight)]
        raise RuntimeError(
            f"Input type ({types[0]}) and weight type ({types[1]}) should be the same"
        )


@_checks("_flash_attention_forward _varlen_attn")
def _flash_attention(func, query, key, value, *_):
    """transformers/cuda/flash_attn/flash_api.cpp, `mha_fwd` and `mha_varlen_fwd`."""
    if torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if query.dtype not in HALF or not query.dtype == key.dtype == value.dtype:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")


# ---------------------------------------------------------------------- indices


def _in_range(func, indices, size, lowest=0, besides=None) -> None:
    # Raises for the first index outside [lowest, size), as CUDA_KERNEL_ASSERT does on a GPU.
    # besides: an index that is always allowed, such as the label that a loss ignores.
    values = values_of(indices)
    if (
        values is None
        or not values.numel()
        or values.is_floating_point()
        or values.dtype == torch.bool
    ):
        return
    with no_dispatch():
        if besides is not None:
            values = values[values != besides]
        outside = values[(values < lowest) | (values >= size)]
        if not outside.numel():
            return
        first = outside.flatten()[0].item()
    raise torch.AcceleratorError(
        f"CUDA error: device-side assert triggered: {func._opname} was given {first}: allowed "
        f"are {lowest} to {size - 1}"
    )


@_checks("embedding")
def _embedding(func, weight, indices, *_):
    """cuda/Indexing.cu, `indexSelectSmallIndex`: "srcIndex < srcSelectDimSize" failed."""
    _in_range(func, indices, weight.size(0))


@_checks("nll_loss_forward nll_loss2d_forward")
def _nll_loss(func, scores, target, weight=None, reduction=1, ignored=-100):
    """cuda/Loss.cu and cuda/NLLLoss2d.cu: "t >= 0 && t < n_classes" failed."""
    _in_range(func, target, scores.size(-1 if scores.dim() < 3 else 1), besides=ignored)


@_checks("gather index_select index_add index_add_ scatter scatter_ scatter_add scatter_add_")
def _along_a_dimension(func, tensor, dim, indices, *_):
    """cuda/ScatterGatherKernel.cu: "index out of bounds" failed."""
    _in_range(func, indices, tensor.size(dim) if tensor.dim() else 1)


@_checks("index index_put index_put_")
def _index(func, tensor, indices, *_):
    """cuda/IndexKernel.cu: "-sizes[i] <= index && index < sizes[i]" failed."""
    # A mask takes several dimensions and becomes indices, all in range; nothing is checked then.
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return
    for dim, index in enumerate(indices):
        if index is not None:
            _in_range(func, index, tensor.size(dim), lowest=-tensor.size(dim))
