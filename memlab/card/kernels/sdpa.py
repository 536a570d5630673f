"""Which kernel `scaled_dot_product_attention` runs on a CUDA GPU, and what that kernel saves.

PyTorch chooses silently, by the GPU, the dtypes, the shapes and the mask. The rules here repeat
those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, function by function, with the checks
of ../sdp_utils_cpp.h. `memlab.card.kernels.rules` installs the chosen kernel in place of the CPU's
while a GPU is simulated.

Known limitations: cuDNN's kernel is not distinguished from flash attention's, and there are no
rules for nested tensors. `sdpa_refusals` has the details.
"""

import warnings

import torch
from torch.torch_version import TorchVersion

from memlab.card.kernels.saved_tensors import Kernel, is_simulated
from memlab.card.refusals import meta_type
from memlab.gpus import card_class


def sdpa_refusals(
    route,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    enable_gqa=False,
    capability=(8, 0),
) -> list[str]:
    """Why a GPU cannot run a kernel of `scaled_dot_product_attention`; empty if it can.

    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `can_use_flash_attention` and
    `can_use_mem_efficient_attention`. Their checks are the same in PyTorch 2.11 to 2.13.

    route: `flash`, `efficient` or `math`. query, key, value: of shape [batch, heads, length, head
    size]. capability: the GPU's. Returns one short reason per rule that is not met. Raises
    ValueError for any other route.

    Known limitations: the rules for nested tensors are left out. On Hopper and Blackwell, recent
    builds try cuDNN's kernel first (`check_prefer_cudnn_attention`), which counts as flash here.
    On an H100, cuDNN's was seen to save what flash saves, and its backward to take as much scratch.
    With a mask, cuDNN's makes one copy of the mask where the efficient kernel makes two.
    """
    if route not in SDPA_ROUTES:
        raise ValueError(f"route is {route!r}: allowed are {', '.join(SDPA_ROUTES)}")
    reasons = [] if SDPA_ROUTES[route]() else ["switched off by sdpa_kernel"]
    if route == "math":
        return reasons  # takes everything that is not refused before (`_validate`)
    reasons += _wrong_dtypes(route, query, key, value, capability)
    # `check_tensor_shapes`. The checks below index dimensions, so they must not run on others.
    if {query.dim(), key.dim(), value.dim()} != {4}:
        return [*reasons, f"the query has {query.dim()} dimensions: allowed are 4"]
    reasons += _wrong_shapes(route, query, key, value, attn_mask, enable_gqa)
    sizes = query.size(-1), key.size(-1), value.size(-1)
    if route == "flash":
        # `check_flash_attention_hardware_support`
        if capability < (8, 0):
            given = "{}.{}".format(*capability)
            reasons.append(f"compute capability is {given}: allowed are 8.0 and later")
        # `check_for_attn_mask`
        if attn_mask is not None:
            reasons.append("attn_mask is given: allowed are None and is_causal")
        # `check_head_dim_size_flash`
        if len(set(sizes)) > 1 or sizes[0] > 256:
            reasons.append(f"head sizes are {sizes}: allowed are equal ones up to 256")
        # `check_flash_causal_non_square_seqlens`: FlashAttention 2 aligns a causal mask with the
        # lower right corner, SDPA with the upper left one.
        if is_causal and query.size(-2) != key.size(-2):
            reasons.append("is_causal with unequal lengths: allowed are equal ones")
        # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`: the backward of
        # large heads does not fit into the shared memory of consumer GPUs.
        trains = any(x.requires_grad for x in (query, key, value)) and torch.is_grad_enabled()
        small = card_class(capability) == "small"
        if trains and small and (192 < sizes[0] <= 224 or (sizes[0] > 224 and dropout_p > 0)):
            given = "{}.{}".format(*capability)
            reasons.append(f"head size is {sizes[0]}: training on {given} allows up to 192")
        return reasons
    # `check_head_dim_size_mem_efficient`, with `minimum_gemm_alignment`: tensor cores load 16 bytes
    # at a time, which are 8 halves or 4 floats. GPUs before Ampere have no tensor cores for fp32.
    half = query.dtype in (torch.float16, torch.bfloat16)
    multiple = (8 if half else 4) if capability >= (8, 0) else (8 if half else 1)
    if sizes[0] != sizes[1] or any(size % multiple for size in sizes):
        reasons.append(f"head sizes are {sizes}: allowed are multiples of {multiple}")
    return reasons


def _wrong_dtypes(route, query, key, value, capability) -> list[str]:
    # `check_dtypes_flash_attention`, and the lists of `can_use_mem_efficient_attention`: bf16 needs
    # Ampere, and only the efficient kernel computes in fp32.
    dtypes = [torch.float16, torch.bfloat16] if capability >= (8, 0) else [torch.float16]
    if route == "efficient":
        dtypes = [*dtypes, torch.float32]
    if query.dtype in dtypes and query.dtype == key.dtype == value.dtype:
        return []
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    given = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
    return [f"dtypes are {given}: allowed are {names}"]


def _wrong_shapes(route, query, key, value, attn_mask, enable_gqa) -> list[str]:
    reasons = []
    # `check_batch_size_and_num_heads_dense`
    batches = query.size(0), key.size(0), value.size(0)
    if len(set(batches)) > 1:
        reasons.append(f"batch sizes are {batches}: allowed are equal ones")
    heads = query.size(1), key.size(1), value.size(1)
    shares = enable_gqa and route in SHARES_KEYS
    grouped = shares and heads[1] == heads[2] and heads[0] % heads[1] == 0
    if len(set(heads)) > 1 and not grouped:
        allowed = "key heads that divide the query's" if shares else "equal ones"
        reasons.append(f"heads are {heads}: allowed are {allowed}")
    # `check_nonzero_sequence_lengths_dense`
    if 0 in (query.size(-2), key.size(-2)):
        reasons.append("a length is 0: allowed are lengths from 1")
    # `check_last_dim_stride_equals_1_dense`
    if {query.stride(-1), key.stride(-1), value.stride(-1)} != {1}:
        reasons.append("the last dimension is not contiguous")
    if attn_mask is not None and attn_mask.stride(-1) != 1:
        reasons.append("the last dimension of attn_mask is not contiguous")
    return reasons


# In the order in which CUDA tries the kernels (`priority_order`), each with the function that tells
# whether `torch.nn.attention.sdpa_kernel` leaves it switched on.
SDPA_ROUTES = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


def kernels_that_share_keys(release: str) -> set[str]:
    """The fused kernels that accept fewer key heads than query heads, in a release of PyTorch.

    PyTorch 2.13's documentation of `enable_gqa`: "currently works only for Flash_attention and math
    kernel on CUDA tensor". Since 2.14, the memory-efficient kernel accepts them too
    (pytorch/pytorch#191085). On a T4, shared keys were seen to run in the math kernel, and repeated
    keys in the efficient one (huggingface/transformers#45776, comment of 2026-08-09).
    """
    return {"flash", "efficient"} if TorchVersion(release) >= "2.14" else {"flash"}


SHARES_KEYS = kernels_that_share_keys(torch.__version__)


def sdpa_route(query, key, value, **call) -> str:
    """The kernel that `scaled_dot_product_attention` runs on CUDA: the first that can.

    sdp_utils.cpp, `select_sdp_backend`. call: the keyword arguments of `sdpa_refusals`. If no
    kernel can run, warns with the reasons and raises RuntimeError with PyTorch's message.
    """
    refused = {}
    for route in SDPA_ROUTES:
        refused[route] = sdpa_refusals(route, query, key, value, **call)
        if not refused[route]:
            return route
    for route, reasons in refused.items():
        warnings.warn(f"{route} attention not used because: {'; '.join(reasons)}", stacklevel=2)
    raise RuntimeError("No available kernel. Aborting execution.")


def model_routes(
    dtype: torch.dtype, shares_keys: bool, capability: tuple[int, int], size: int = 64
) -> tuple[str, str]:
    """The kernels of a transformers model's attention: (without a mask, with a mask).

    Nothing else about a GPU decides how attention is computed, so GPUs with equal answers allocate
    the same bytes for it.

    dtype: of query, key and value. shares_keys: whether there are fewer key heads than query heads.
    transformers passes shared keys as they are if there is no mask and a head has up to 256
    elements; otherwise it repeats them (transformers/integrations/sdpa_attention.py,
    `use_gqa_in_sdpa`). capability: the GPU's. size: of a head.
    """

    # Meta tensors of any length do: the rules read shapes, strides and dtypes only.
    def heads(number):
        return torch.empty(1, number, 128, size, dtype=dtype, device="meta", requires_grad=True)

    passed = 1 if shares_keys and size <= 256 else 2
    mask = torch.empty(1, 1, 128, 128, dtype=dtype, device="meta")
    call = {"enable_gqa": passed == 1, "capability": capability}
    return (
        sdpa_route(heads(2), heads(passed), heads(passed), is_causal=True, **call),
        sdpa_route(heads(2), heads(2), heads(2), attn_mask=mask, capability=capability),
    )


def scaled_dot_product_attention(
    gpu,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
):
    """Run attention in the kernel that a GPU would choose.

    aten/src/ATen/native/transformers/attention.cpp, `scaled_dot_product_attention`. The fused
    kernels save no [length, length] matrix for the backward pass; math does. gpu: the
    `memlab.gpus.GPU` that chooses.
    """
    _validate(query, key, value, attn_mask)
    call = {
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "enable_gqa": enable_gqa,
        "capability": gpu.capability,
    }
    # Tensors with data lie on the host, where math is the only kernel used.
    route = sdpa_route(query, key, value, **call) if is_simulated(query) else "math"
    if route == "math":
        return torch._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if route == "flash":
        # `pad_last_dim<8>`: the kernel wants head sizes in multiples of 8. The scale is that of the
        # size before padding. Fewer key heads than query heads are passed on as they are.
        size = query.size(-1)
        scale = size**-0.5 if scale is None else scale
        if size % 8:
            query, key, value = (
                torch.nn.functional.pad(x, (0, 8 - size % 8)) for x in (query, key, value)
            )
        out = torch._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :size] if size % 8 else out
    if attn_mask is not None:
        attn_mask = _mask_of_efficient_kernel(attn_mask, query, key)
    # `should_compute_logsumexp`: one fp32 per query, which the backward pass needs.
    keeps_lse = query.requires_grad or key.requires_grad or value.requires_grad
    return torch._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keeps_lse, dropout_p, is_causal, scale=scale
    )[0]


def _validate(query, key, value, attn_mask) -> None:
    """Raise what `validate_sdpa_input` in transformers/attention.cpp raises for dtypes."""
    if not query.dtype == key.dtype == value.dtype:
        given = [f"{n}.dtype: {meta_type(x)}" for n, x in (("query", query), (" key", key))]
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got "
            f"{''.join(given)} and value.dtype: {meta_type(value)} instead."
        )
    allowed = (torch.bool, torch.float32, query.dtype)
    if attn_mask is not None and attn_mask.dtype not in allowed:
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {meta_type(attn_mask)} and  query.dtype: {meta_type(query)} instead."
        )


def _mask_of_efficient_kernel(attn_mask, query, key):
    """The additive mask that the memory-efficient kernel reads, [batch, heads, queries, keys].

    transformers/attention.cpp: `convert_boolean_attn_mask`, then `preprocess_mask`. The mask takes
    the query's dtype, and its rows begin at multiples of 8 elements.
    """
    if attn_mask.dtype == torch.bool:
        # NB: newer sources, PyTorch 2.13's among them, call `where(mask, 0.0, -inf)` instead. They
        # allocate no inverted mask, one byte per element, on the way.
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
    attn_mask = attn_mask.to(query.dtype)
    columns = key.size(-2)
    if columns % 8 and attn_mask.size(-1) == columns:
        # `pad_bias<8>`: a padded copy, of which the view has the mask's own columns.
        attn_mask = torch.nn.functional.pad(attn_mask, (0, 8 - columns % 8))[..., :columns]
    return attn_mask.expand(*query.shape[:-1], columns)  # a view: heads share the mask


KERNELS = [
    Kernel("attention", "scaled_dot_product_attention", scaled_dot_product_attention, of_card=True)
]
