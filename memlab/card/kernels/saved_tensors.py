"""Saved tensors: what CUDA kernels keep for the backward pass, where CPU kernels keep others.

The simulated GPU runs on fake CPU tensors. Their shapes are right, but some CPU kernels save
other tensors for the backward pass than the CUDA kernels do. Each function here is PyTorch's own
CUDA choice and names its source in the PyTorch repository; `memlab.card.kernels.rules` puts
them in place.
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
    """A function that stands for an operator of PyTorch's dispatcher while a rule holds.

    of_card: whether its first argument is the `memlab.gpus.GPU`, because cards differ in it.
    """

    rule: str
    operator: str
    function: Callable
    of_card: bool = False
    key: str = "AutogradCPU"
    package: str = "aten"


def is_simulated(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data: itself or, as a DTensor, the part that this rank holds."""
    return any(isinstance(part, FakeTensor) for part in inner_tensors(tensor))


def dropout(input, p, train):
    """CUDA keeps a mask of one byte per element; the CPU keeps one as wide as the input.

    aten/src/ATen/native/Dropout.cpp: `is_fused_kernel_acceptable` sends CUDA tensors with
    0 < p < 1 to `native_dropout`.
    """
    if not train or p == 0:
        return input
    return torch.native_dropout(input, p, train)[0]


def _fused_softmax(kernel, input, dim, dtype=None):
    """softmax(half, dtype=float32) makes no fp32 copy of its input on CUDA.

    aten/src/ATen/native/SoftMax.cpp: `softmax` passes half_to_float to the kernel for CUDA; so does
    `log_softmax`, the first half of the cross-entropy.
    """
    if is_simulated(input) and dtype == torch.float32 and input.dtype == torch.float16:
        return kernel(input, dim, True)
    return kernel(input if dtype is None else input.to(dtype), dim, False)


# ---------------------------------------------------------------------- autocast

# Operations by what autocast does with them on CUDA and not on a CPU: the macros AT_FORALL_ of
# aten/src/ATen/autocast_mode.h. Those for which both do the same, such as products and most losses,
# are left out.
AUTOCAST_FP32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm "
    "group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity dist pdist "
    "renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa"
).split()
# Those that take a dtype, which is set to fp32 where it is not set: AT_FORALL_FP32_SET_OPT_DTYPE.
AUTOCAST_FP32_DTYPE = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
    "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
# Those with another form that takes it: AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE.
AUTOCAST_FP32_APPENDED = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
# Those that run in the widest format among their tensors: AT_FORALL_PROMOTE.
AUTOCAST_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
).split()


@functools.cache  # of 3,300 operators
def autocast_of_cpu_only() -> list[str]:
    """Operations that autocast changes on a CPU and leaves alone on CUDA, such as cross_entropy."""
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
    if any(isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in given):
        return _run_in_fp32(function, *args, **kwargs)
    with _no_autocast():
        return function(*args, **kwargs)


def _no_autocast():
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
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"):
            function = functools.partial(how, _operator(runs))
            yield Kernel("autocast", name, function, key="AutocastCPU")


KERNELS = [
    Kernel("dropout", "dropout", dropout),
    *(
        Kernel("softmax to fp32", f"{name}.int", functools.partial(_fused_softmax, kernel))
        for name, kernel in (("softmax", torch._softmax), ("log_softmax", torch._log_softmax))
    ),
    # CUDA normalizes in one kernel and keeps one number per row; a CPU takes it apart.
    # aten/src/ATen/native/layer_norm.cpp: `rms_norm_symint` asks for it where the dtypes agree.
    # These are for tensors that have data; a mode sees the operator itself.
    *(
        Kernel("RMS norm", name, getattr(decompositions, name), key="CPU")
        for name in ("_fused_rms_norm", "_fused_rms_norm_backward")
    ),
    *_autocast_kernels(),
]
