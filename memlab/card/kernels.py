"""What CUDA kernels keep in memory where CPU kernels keep something else.

The simulated GPU runs on fake CPU tensors. Their shapes are right, but some CPU kernels save
other tensors for the backward pass than the CUDA kernels do. `cuda_kernels()` registers, for
as long as it is entered, PyTorch's own CUDA choice at PyTorch's own dispatcher. Each rule is one
function that names its source in the PyTorch repository; nothing here is fitted to a figure.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from unittest import mock

import torch

from memlab import quantized
from memlab.card.attention import scaled_dot_product_attention

# Every rule by name, with where it is written down. `memlab.changes` says what each one changes.
RULES = {
    "dropout": "PyTorch, aten/src/ATen/native/Dropout.cpp",
    "softmax to fp32": "PyTorch, aten/src/ATen/native/SoftMax.cpp",
    "attention": "PyTorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
    "autocast": "PyTorch, aten/src/ATen/autocast_mode.h",
    "4-bit numbers": "bitsandbytes, bitsandbytes/backends/cuda/ops.py",
    "8-bit products": "bitsandbytes, bitsandbytes/backends/cuda/ops.py",
    "softmax backward": "PyTorch, aten/src/ATen/native/cuda/SoftMax.cu",
    "numbers on the host": "PyTorch, torch/optim/adam.py, and torch.tensor's documentation",
    "paged states": "bitsandbytes, bitsandbytes/optim/optimizer.py",
}
KERNELS = []  # (rule, operator, function)


def cuda_kernel(rule, operator):
    """Register the decorated function for `operator` while `cuda_kernels()` is entered."""

    def register(function):
        KERNELS.append((rule, operator, function))
        return function

    return register


@contextlib.contextmanager
def cuda_kernels(gpu=None, rules=frozenset(RULES), met=None):
    """Let operations on CPU tensors keep what CUDA keeps.

    gpu: the `memlab.gpus.GPU` whose choices count where kernels differ between cards.
    rules: which of `RULES` hold. met: a set that gets the name of every rule that was at work.
    """
    met = set() if met is None else met
    libraries = {"aten": torch.library.Library("aten", "IMPL")}
    if "bitsandbytes" in sys.modules:
        libraries["bitsandbytes"] = torch.library.Library("bitsandbytes", "IMPL")

    def register(rule, operator, function, key="AutogradCPU", package="aten"):
        if rule in rules and package in libraries:

            def noted(*args, **kwargs):
                met.add(rule)
                return function(*args, **kwargs)

            libraries[package].impl(operator, noted, key)

    for kernel in KERNELS:
        register(*kernel)
    attention = functools.partial(scaled_dot_product_attention, gpu)
    register("attention", "scaled_dot_product_attention", attention)
    for operator in AUTOCAST_FP32:
        register("autocast", operator, _autocast(operator, _run_in_fp32), "AutocastCPU")
    for operator in AUTOCAST_FP32_DTYPE:
        register("autocast", operator, _autocast(operator, _ask_for_fp32), "AutocastCPU")
    fused = functools.partial(_fuses_4bit_product, gpu)
    for rule, operator, function in (
        ("4-bit numbers", "quantize_4bit", quantize_4bit),
        ("4-bit numbers", "quantize_blockwise", quantize_blockwise),
        ("4-bit numbers", "gemm_4bit", functools.partial(gemm_4bit, fused)),
        ("8-bit products", "int8_vectorwise_quant", int8_vectorwise_quant),
        ("8-bit products", "int8_mixed_scaled_mm", int8_mixed_scaled_mm),
        ("8-bit products", "int8_scaled_mm", int8_scaled_mm),
    ):
        register(rule, operator, function, package="bitsandbytes")
    with contextlib.ExitStack() as stack:
        for library in libraries.values():
            stack.callback(library._destroy)
        if "8-bit products" in rules:
            stack.enter_context(quantized.int8_products_of_cuda())
        yield


# ---------------------------------------------------------------------- kernels


@cuda_kernel("dropout", "dropout")
def dropout(input, p, train):
    """CUDA keeps a mask of one byte an element; the CPU keeps one as wide as the input.

    aten/src/ATen/native/Dropout.cpp: `is_fused_kernel_acceptable` sends CUDA tensors with
    0 < p < 1 to `native_dropout`.
    """
    if not train or p == 0:
        return input
    return torch.native_dropout(input, p, train)[0]


@cuda_kernel("softmax to fp32", "softmax.int")
def softmax(input, dim, dtype=None):
    """softmax(half, dtype=float32) makes no fp32 copy of its input on CUDA.

    aten/src/ATen/native/SoftMax.cpp: `softmax` passes half_to_float to the kernel for CUDA.
    """
    return _fused_softmax(torch._softmax, input, dim, dtype)


@cuda_kernel("softmax to fp32", "log_softmax.int")
def log_softmax(input, dim, dtype=None):
    """The same for log_softmax, the first half of the cross-entropy."""
    return _fused_softmax(torch._log_softmax, input, dim, dtype)


def _fused_softmax(kernel, input, dim, dtype):
    if dtype == torch.float32 and input.dtype == torch.float16:
        return kernel(input, dim, True)
    return kernel(input if dtype is None else input.to(dtype), dim, False)


# ---------------------------------------------------------------------- bitsandbytes


def gemm_4bit(
    fused,
    A,
    B,
    shapeB,
    absmax,
    blocksize,
    quant_type,
    bias=None,
    absmax_8bit=None,
    absmax_code=None,
    absmax_offset=None,
):
    """A product with a 4-bit weight writes the whole weight out first, except for few tokens.

    bitsandbytes/backends/cuda/ops.py: `_dequant_linear_fallback`, or the fused kernel.
    """
    columns = A.size(-1)
    rows = A.numel() // columns
    if columns % blocksize == 0 and fused(A.dtype, rows, *shapeB):
        return A.new_empty(*A.shape[:-1], shapeB[0])
    if absmax_8bit is not None:
        scales = torch.empty_like(absmax_8bit, dtype=torch.float32)
        scales = scales, scales + absmax_offset  # both stay to the end, as there
    weight = A.new_empty(shapeB)
    return torch.nn.functional.linear(A, weight, bias)


def _fuses_4bit_product(gpu, dtype, rows, n, k) -> bool:
    """bitsandbytes' own rule, a table of measured cases, asked for the card."""
    module = _bitsandbytes_cuda_module()
    if rows > module._gemm_4bit_custom_max_m:
        return False
    processors, capability = (gpu.processors, gpu.capability) if gpu else (108, (8, 0))
    with mock.patch.object(module, "_gpu_dispatch_props", lambda _: (processors, *capability)):
        return module._gemm_4bit_use_custom_cuda.__wrapped__(0, dtype, rows, n, k)


@functools.cache
def _bitsandbytes_cuda_module():
    """bitsandbytes.backends.cuda.ops, which looks for CUDA's library while it is imported."""
    extension = importlib.import_module("bitsandbytes.cextension")
    operators = importlib.import_module("bitsandbytes._ops")
    with (
        mock.patch.object(extension, "lib", mock.MagicMock()),
        mock.patch.object(operators, "register_kernel", lambda *names: lambda function: function),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", None, create=True),
        mock.patch.dict(sys.modules),
    ):
        sys.modules.pop("bitsandbytes.backends.cuda.ops", None)
        return importlib.import_module("bitsandbytes.backends.cuda.ops")


def quantize_4bit(A, blocksize, quant_type, quant_storage):
    """The scales take their memory before the weights do, the other way round than on a CPU.

    bitsandbytes/backends/cuda/ops.py, as the next one, for the scales of the scales.
    """
    numbers = A.numel()
    absmax = A.new_empty(-(numbers // -blocksize), dtype=torch.float32)
    packed = (numbers + 1) // (quant_storage.itemsize * 2)
    return A.new_empty(packed, 1, dtype=quant_storage), absmax


def quantize_blockwise(A, code, blocksize):
    absmax = A.new_empty(-(A.numel() // -blocksize), dtype=torch.float32)
    return torch.empty_like(A, dtype=torch.uint8), absmax


def int8_vectorwise_quant(A, threshold=0.0):
    """Rows in 8 bits, and a search for outliers, which tensors without data do not have.

    bitsandbytes/backends/cuda/ops.py, as the two below.
    """
    stats = A.new_empty(A.numel() // A.size(-1), dtype=torch.float32)
    rows = A.new_empty(A.shape, dtype=torch.int8)
    if not threshold:
        return rows, stats, None
    outliers = A.abs() >= threshold
    outliers.any()
    return rows, stats, A.new_empty(0, dtype=torch.int64)


def int8_mixed_scaled_mm(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
    """The product in 8 bits, and an empty one of the outliers."""
    product = torch.ops.bitsandbytes.int8_scaled_mm.default(CA, CB, SCA, SCB, bias, A.dtype)
    return product, A.new_empty(0)


def int8_scaled_mm(A, B, row_stats, col_stats, bias=None, dtype=None):
    """An int32 product, then fp16, then the dtype that was asked for."""
    integers = A.new_empty(*A.shape[:-1], B.size(0), dtype=torch.int32)
    out = torch.empty_like(integers, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        out.add_(bias)
    return out.to(dtype or torch.float16)


# ---------------------------------------------------------------------- autocast

# Operations that autocast runs in fp32 on CUDA and leaves alone on a CPU. Source: the macro
# AT_FORALL_FP32 in aten/src/ATen/autocast_mode.h. The losses of that list are in the CPU's too.
AUTOCAST_FP32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm group_norm "
    "cosine_similarity dist renorm"
).split()
# Operations that take a dtype, which autocast sets to fp32: AT_FORALL_FP32_SET_OPT_DTYPE.
AUTOCAST_FP32_DTYPE = ("softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList").split()


def _autocast(operator, how):
    packet, _, overload = operator.partition(".")
    return functools.partial(how, getattr(getattr(torch.ops.aten, packet), overload or "default"))


def _run_in_fp32(function, *args, **kwargs):
    with _no_autocast():
        return function(*map(_to_fp32, args), **{k: _to_fp32(v) for k, v in kwargs.items()})


def _ask_for_fp32(function, *args, **kwargs):
    names = (argument.name for argument in function._schema.arguments)
    named = dict(zip(names, args, strict=False)) | kwargs
    if named.get("dtype") is None and any(
        isinstance(a, torch.Tensor) and _is_half(a) for a in args
    ):
        named["dtype"] = torch.float32
    with _no_autocast():
        return function(**named)


def _no_autocast():
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(key)


def _is_half(value):
    return value.dtype in (torch.float16, torch.bfloat16)


def _to_fp32(value):
    return value.float() if isinstance(value, torch.Tensor) and _is_half(value) else value


# ---------------------------------------------------------------------- memory of the libraries


def kernel_scratch(func, args) -> int:
    """Bytes that the CUDA kernel of an operation takes and gives back inside the operation.

    Softmax's backward computes `grad * output` into a temporary tensor before the kernel runs:
    aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`. Flash attention's backward
    sums the query's gradient in fp32, and computes the gradients of keys and values for every query
    head before it adds those of a group: aten/src/ATen/native/transformers/cuda/flash_attn/
    flash_api.cpp, `mha_bwd`.
    """
    if func is torch.ops.aten._softmax_backward_data.default:
        return args[0].numel() * args[1].element_size()
    if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
        query, key = args[1:3]
        batch, heads, length, size = query.shape
        size = -(-size // 32) * 32 if size <= 192 else 256
        scratch = 4 * batch * heads * (-(-length // 128) * 128) * (size + 1)
        if key.size(1) != heads:
            scratch += 2 * batch * heads * key.size(2) * key.size(3) * key.element_size()
        return scratch
    return 0


CUBLASLT_WORKSPACE = 2**20  # addmm with a bias: aten/src/ATen/cuda/CUDABlas.cpp


def uses_cublas(func) -> bool:
    """Whether an operation is a matrix product, which needs cuBLAS's workspace."""
    return func in _MATRIX_PRODUCTS


_MATRIX_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm")
)
