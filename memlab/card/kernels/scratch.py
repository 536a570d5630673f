"""What CUDA kernels and libraries take beside their results: scratch, and cuBLAS's workspaces."""

import math

import torch

from memlab.trace.reductions import Reduction


def kernel_scratch(func, args) -> list[list[int]]:
    """Bytes of the tensors that the CUDA kernel of an operation takes and gives back inside it.

    A list of those that are there together, for each time.

    Softmax's backward computes `grad * output` into a temporary tensor before the kernel runs:
    aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`. Flash attention's backward
    sums the query's gradient in fp32, and computes the gradients of keys and values for every query
    head before it adds those of a group: aten/src/ATen/native/transformers/cuda/flash_attn/
    flash_api.cpp, `mha_bwd`, and `mha_varlen_bwd` where sequences stand one behind the other. The
    backward of a norm copies gradient and input where they are not contiguous:
    aten/src/ATen/native/cuda/layer_norm_kernel.cu, `LayerNormBackwardKernelImpl`.
    """
    name = func._opname
    if name in ("native_layer_norm_backward", "_fused_rms_norm_backward"):
        copies = [tensor.nbytes for tensor in args[:2] if not tensor.is_contiguous()]
        return [copies] if copies else []
    if name == "_softmax_backward_data":
        return [[args[0].numel() * args[1].element_size()]]
    if name == "_scaled_dot_product_efficient_attention_backward":
        return _of_efficient(*args[:2])
    if name == "_scaled_dot_product_flash_attention_backward":
        query, key = (tensor.transpose(1, 2) for tensor in args[1:3])
        return [_of_flash(query, key, None)]
    if name in ("_flash_attention_backward", "_varlen_attn_backward"):
        return [_of_flash(args[1], args[2], args[6])]
    return []


def _of_efficient(grad, query) -> list[list[int]]:
    """Of [batch, heads, length, head size]: sums of gradient times output, then of gradients.

    That of the query is summed in fp32. In fp32 PyTorch multiplies gradient and output before, in
    half precision the kernel does: `_efficient_attention_backward` in
    aten/src/ATen/native/transformers/cuda/attention_backward.cu, `AttentionBackwardKernel` in
    mem_eff_attention/kernel_backward.h. The kernel's blocks are not in it: they round length and
    head size up, mostly to 64, and have 16 bytes each. Nor are the gradients of keys and values,
    which half precision sums in fp32, too, where heads have more than 64 or 128 numbers: a block's
    for each head.
    """
    of_rows = 4 * query.numel() // query.size(-1)
    before = [] if query.element_size() == 2 else [[4 * grad.numel(), of_rows, of_rows]]
    return [*before, [of_rows, 4 * query.numel()]]


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


def reduction_of(func, args) -> Reduction | None:
    """The sum along rows that an operation is, whose kernel may take a buffer; None for none.

    Numbers that stand beside each other are then of different columns.
    """
    if func not in _SUMS or args[0].dtype not in _ADDED_IN_FP32 or not args[1]:
        return None
    summed = {dim % args[0].dim() for dim in args[1]}
    sizes = list(zip(args[0].shape, args[0].stride(), strict=True))
    remaining = [size for dim, size in enumerate(sizes) if dim not in summed and size[0] > 1]
    if not remaining or min(stride for _, stride in remaining) > 1:
        return None
    columns = math.prod(size for size, _ in remaining)
    return Reduction(args[0].numel() // columns, columns)


_SUMS = torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim
_ADDED_IN_FP32 = torch.float32, torch.float16, torch.bfloat16
CUBLASLT_WORKSPACE = 2**20  # addmm with a bias: aten/src/ATen/cuda/CUDABlas.cpp


# Need cuBLAS's workspace.
MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"}
