"""What CUDA kernels and libraries take beside their results: scratch, and cuBLAS's workspaces."""

import torch


def kernel_scratch(func, args) -> list[int]:
    """Bytes of each tensor that the CUDA kernel of an operation takes and gives back inside it.

    Softmax's backward computes `grad * output` into a temporary tensor before the kernel runs:
    aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`. Flash attention's backward
    sums the query's gradient in fp32, and computes the gradients of keys and values for every query
    head before it adds those of a group: aten/src/ATen/native/transformers/cuda/flash_attn/
    flash_api.cpp, `mha_bwd`, and `mha_varlen_bwd` where sequences stand one behind the other. The
    backward of a norm copies gradient and input where they are not contiguous:
    aten/src/ATen/native/cuda/layer_norm_kernel.cu, `LayerNormBackwardKernelImpl`.
    """
    if func in _NORMS_BACKWARD:
        return [tensor.nbytes for tensor in args[:2] if not tensor.is_contiguous()]
    if func is torch.ops.aten._softmax_backward_data.default:
        return [args[0].numel() * args[1].element_size()]
    if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
        return _of_flash(*(x.transpose(1, 2) for x in args[1:3]), None)
    if func._opname in ("_flash_attention_backward", "_varlen_attn_backward"):
        return _of_flash(*args[1:3], args[6])
    return []


def _of_flash(query, key, borders) -> list[int]:
    """Of [batch, length, heads, head size]; with borders of ragged [tokens, heads, head size]."""
    heads, size = query.shape[-2:]
    if borders is None:
        rows = query.size(0) * (-(-query.size(1) // 128) * 128)
    else:
        rows = query.size(0) + 128 * (len(borders) - 1)
    sums = 4 * heads * rows
    scratch = [sums, sums * (-(-size // 32) * 32 if size <= 192 else 256)]
    if key.size(-2) != heads:
        tokens = key.numel() // (key.size(-2) * size)
        scratch += 2 * [tokens * heads * size * key.element_size()]
    return scratch


_NORMS_BACKWARD = (
    torch.ops.aten.native_layer_norm_backward.default,
    torch.ops.aten._fused_rms_norm_backward.default,
)
CUBLASLT_WORKSPACE = 2**20  # addmm with a bias: aten/src/ATen/cuda/CUDABlas.cpp


def uses_cublas(func) -> bool:
    """Whether an operation is a matrix product, which needs cuBLAS's workspace."""
    return func in _MATRIX_PRODUCTS


_MATRIX_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm")
)
