"""Memory that CUDA kernels and libraries allocate besides their results.

Two kinds: the scratch tensors of single kernels, and the workspaces of cuBLAS. The bytes are read
from PyTorch's C++, which each function names. The functions of this module only compute sizes;
`memlab.card.kernels.taken` allocates them.
"""

import math

import torch

from memlab.trace.reductions import Reduction


def kernel_scratch(func, args) -> list[list[int]]:
    """Bytes of the tensors that an operator's CUDA kernel allocates and frees inside it.

    Returns groups of tensors that are alive together, one group after the other. All these kernels
    are backward kernels. Only sizes and strides of the arguments are read.
    """
    name = func._opname
    # aten/src/ATen/native/cuda/layer_norm_kernel.cu: `layer_norm_backward_cuda` takes
    # `input.expect_contiguous()`, and `LayerNormBackwardKernelImpl` takes `dY.contiguous()`.
    if name in ("native_layer_norm_backward", "_fused_rms_norm_backward"):
        copies = [tensor.nbytes for tensor in args[:2] if not tensor.is_contiguous()]
        return [copies] if copies else []
    # aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`: `tmp = grad * output`.
    if name == "_softmax_backward_data":
        return [[args[0].numel() * args[1].element_size()]]
    if name == "_scaled_dot_product_efficient_attention_backward":
        return _of_efficient(*args[:2])
    # SDPA's tensors are [batch, heads, length, head size]; the flash kernel swaps the middle two.
    if name == "_scaled_dot_product_flash_attention_backward":
        query, key = (tensor.transpose(1, 2) for tensor in args[1:3])
        return [_of_flash(query, key, None)]
    # args[6] is `cum_seq_q` of the first, which may be None, and `cu_seq_q` of the second.
    if name in ("_flash_attention_backward", "_varlen_attn_backward"):
        return [_of_flash(args[1], args[2], args[6])]
    return []


def _of_efficient(grad, query) -> list[list[int]]:
    """Scratch of the memory-efficient backward, for [batch, heads, length, head size].

    `_efficient_attention_backward` in aten/src/ATen/native/transformers/cuda/attention_backward.cu
    allocates `delta`, the row sums of `grad_out * out` in fp32. The kernel's workspace holds the
    query's gradient in fp32 (`AttentionBackwardKernel`, `kNeedsAccumGradQ`, in mem_eff_attention/
    kernel_backward.h).

    Known limitations: two parts of the workspace are left out. Its blocks round length and head
    size up, mostly to 64, and have 16 bytes more each. In half precision, with heads of more than
    64 or 128 elements, it also holds one block of the key's and value's gradients per head.
    """
    of_rows = 4 * query.numel() // query.size(-1)  # delta: [batch, heads, length] in fp32
    # `kKernelComputesDelta` holds for half precision. In fp32 PyTorch computes delta itself, as
    # `(grad_out * out).sum(-1).transpose(-2, -1).contiguous()`: the product, its sum, and the copy.
    # NB: for wide heads on compute capability 7.0, the source does so in half precision too.
    before = [] if query.element_size() == 2 else [[4 * grad.numel(), of_rows, of_rows]]
    return [*before, [of_rows, 4 * query.numel()]]  # delta, the query's gradient


def _of_flash(query, key, borders) -> list[int]:
    """Scratch of flash attention's backward: one group of tensors.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: `mha_bwd` for dense
    [batch, length, heads, head size], and `mha_varlen_bwd` for ragged [tokens, heads, head size]
    with borders, the cumulative lengths of the sequences.
    """
    heads, size = query.shape[-2:]
    if borders is None:
        rows = query.size(0) * (-(-query.size(1) // 128) * 128)  # seqlen_q_rounded
    else:
        rows = query.size(0) + 128 * (len(borders) - 1)  # total_q + 128 * batch_size
    sums = 4 * heads * rows  # softmax_d, in fp32
    # dq_accum: the query's gradient, summed in fp32 with a rounded head size.
    # NB: the source at commit 03b7c19d rounds sizes above 128 to multiples of 64.
    scratch = [sums, sums * (-(-size // 32) * 32 if size <= 192 else 256)]
    if key.size(-2) != heads:
        # dk_expanded and dv_expanded: gradients for every query head, before a group is summed.
        tokens = key.numel() // (key.size(-2) * size)
        scratch += 2 * [tokens * heads * size * key.element_size()]
    return scratch


def reduction_of(func, args) -> Reduction | None:
    """The sum over rows of a matrix that an operation computes; None if it is no such sum.

    CUDA's kernel for it may allocate a buffer (`memlab.trace.reductions`). Neighbours in memory
    belong to different columns: `reduction_on_fastest_striding_dimension` is false in
    `setReduceConfig` of aten/src/ATen/native/cuda/Reduce.cuh. The gradient of a bias is the usual
    case.
    """
    if func not in _SUMS or args[0].dtype not in _ADDED_IN_FP32 or not args[1]:
        return None
    summed = {dim % args[0].dim() for dim in args[1]}
    sizes = list(zip(args[0].shape, args[0].stride(), strict=True))
    remaining = [size for dim, size in enumerate(sizes) if dim not in summed and size[0] > 1]
    if not remaining or min(stride for _, stride in remaining) > 1:
        return None  # a summed dimension is the fastest in memory, or one number remains
    columns = math.prod(size for size, _ in remaining)
    return Reduction(args[0].numel() // columns, columns)


_SUMS = torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim
_ADDED_IN_FP32 = torch.float32, torch.float16, torch.bfloat16
# `parseCUDABlasLtWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: 1,024 KiB, unless
# CUBLASLT_WORKSPACE_SIZE is set. `addmm` with a bias uses it (`gemm_and_bias` in CUDABlas.cpp). It
# is an allocation of its own, unless TORCH_CUBLASLT_UNIFIED_WORKSPACE is 1.
CUBLASLT_WORKSPACE = 2**20


# Operators that call cuBLAS, and so allocate its workspace when they are the first.
MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"}
