"""What CUDA kernels save for the backward pass, where CPU kernels save other tensors.

To PyTorch, the fake tensors of a simulated GPU are CPU tensors. Their shapes are right, but some
CPU kernels save other tensors than the CUDA kernels do, and autocast changes other operators. Each
function here is the choice that PyTorch makes on CUDA, with its source. `memlab.card.kernels.rules`
registers the functions with the dispatcher.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor

from memlab.card.collectives import named
from memlab.trace.tensors import inner_tensors


class Kernel(NamedTuple):
    """A function that replaces an operator's kernel while a rule holds.

    rule: the rule's name in `memlab.card.kernels.rules.RULES`.
    operator: the operator's name, with its overload where it has one.
    of_card: whether the function takes the `memlab.gpus.GPU` first, because GPUs differ in it.
    key: the dispatch key under which it is registered.
    package: the operator's namespace.
    """

    rule: str
    operator: str
    function: Callable
    of_card: bool = False
    key: str = "AutogradCPU"
    package: str = "aten"


def is_simulated(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data; of a DTensor, whether this rank's shard has none."""
    return any(isinstance(part, FakeTensor) for part in inner_tensors(tensor))


def dropout(input, p, train):
    """Save a boolean mask, one byte per element; a CPU saves one in the input's dtype.

    aten/src/ATen/native/Dropout.cpp: `is_fused_kernel_acceptable` sends CUDA tensors with
    0 < p < 1 to `native_dropout`. NB: p = 1 goes there too; the source multiplies by zeros then.
    """
    if not train or p == 0:
        return input  # as `_dropout_impl` does: nothing is saved
    return torch.native_dropout(input, p, train)[0]


def _fused_softmax(kernel, input, dim, dtype=None):
    """Compute softmax(fp16, dtype=float32) without an fp32 copy of the input, as on CUDA.

    aten/src/ATen/native/SoftMax.cpp: `softmax` passes half_to_float=True to the kernel for CUDA
    tensors in fp16. So does `log_softmax`, the first half of the cross-entropy. bf16 is converted
    first, on CUDA as well.
    """
    if is_simulated(input) and dtype == torch.float32 and input.dtype == torch.float16:
        return kernel(input, dim, True)
    return kernel(input if dtype is None else input.to(dtype), dim, False)


# ---------------------------------------------------------------------- autocast

# Operators that autocast treats in another way on CUDA than on a CPU, by the AT_FORALL_ macro of
# aten/src/ATen/autocast_mode.h that lists them. Operators that both treat alike are left out, such
# as matrix products and most losses.
#
# AT_FORALL_FP32: the arguments are converted to fp32.
AUTOCAST_FP32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm "
    "group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity dist pdist "
    "renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa"
).split()
# AT_FORALL_FP32_SET_OPT_DTYPE: they take a dtype, which becomes fp32 if the caller gave none.
AUTOCAST_FP32_DTYPE = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
    "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: another overload takes the dtype.
AUTOCAST_FP32_APPENDED = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
# AT_FORALL_PROMOTE: they run in the widest dtype among their tensors.
AUTOCAST_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
).split()


@functools.cache  # it asks the dispatcher about 3,300 operators
def autocast_of_cpu_only() -> list[str]:
    """Operators that autocast changes on a CPU but not on CUDA, such as cross_entropy_loss."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    return [
        name.removeprefix("aten::")
        for name in names
        if name.startswith("aten::") and has(name, "AutocastCPU") and not has(name, "AutocastCUDA")
    ]


def _operator(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _run_in_fp32(function, *args, **kwargs):
    # The conversions are operations like any other: autograd saves what their backward needs.
    with _no_autocast():
        return function(*map(_to_fp32, args), **{k: _to_fp32(v) for k, v in kwargs.items()})


def _ask_for_fp32(function, *args, **kwargs):
    given = named(function, args) | kwargs
    if given.get("dtype") is None and _is_half(args[0]):
        given["dtype"] = torch.float32
    with _no_autocast():
        return function(**given)


def _run_in_the_widest(function, *args, **kwargs):
    given = (*args, *kwargs.values())
    # Without an fp32 tensor, the inputs keep their dtype: `prioritize` ignores fp64 ones.
    if any(isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in given):
        return _run_in_fp32(function, *args, **kwargs)
    with _no_autocast():
        return function(*args, **kwargs)


def _no_autocast():
    # As autocast's own kernels do: what they call must not be autocast again.
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(key)


def _is_half(value):
    return value.dtype in (torch.float16, torch.bfloat16)


def _to_fp32(value):
    return value.float() if isinstance(value, torch.Tensor) and _is_half(value) else value


def _autocast_kernels():
    ways = [
        *((name, name, _run_in_fp32) for name in AUTOCAST_FP32),
        *((name, name, _ask_for_fp32) for name in AUTOCAST_FP32_DTYPE),
        *((name, other, _ask_for_fp32) for name, other in AUTOCAST_FP32_APPENDED.items()),
        *((name, name, _run_in_the_widest) for name in AUTOCAST_WIDEST),
    ]
    for name, runs, how in ways:
        # A release may have dropped an operator from the list, or not have the operator yet.
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"):
            function = functools.partial(how, _operator(runs))
            yield Kernel("autocast", name, function, key="AutocastCPU")


KERNELS = [
    Kernel("dropout", "dropout", dropout),
    *(
        Kernel("softmax to fp32", f"{name}.int", functools.partial(_fused_softmax, kernel))
        for name, kernel in (("softmax", torch._softmax), ("log_softmax", torch._log_softmax))
    ),
    # CUDA normalizes in one kernel, which saves one number per row (rstd). A CPU has no such kernel
    # and decomposes the operator. aten/src/ATen/native/layer_norm.cpp: `rms_norm_symint` calls
    # `_fused_rms_norm` if input and weight have the same dtype. The functions compute the values of
    # tensors with data; without data, the dispatch mode sees the operator whole.
    *(
        Kernel("RMS norm", name, getattr(decompositions, name), key="CPU")
        for name in ("_fused_rms_norm", "_fused_rms_norm_backward")
    ),
    *_autocast_kernels(),
]
