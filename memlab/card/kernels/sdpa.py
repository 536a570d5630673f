"""Which kernel `scaled_dot_product_attention` takes on a CUDA card, and what that kernel keeps.

PyTorch decides by the card, the dtypes, the shapes and the mask, and says nothing about it. The
rules here are its own, read from its source; `memlab.card.kernels.rules` puts the kernels in place
of the CPU's while a card is simulated.
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
    """Why a CUDA card cannot take a route of `scaled_dot_product_attention`; empty if it can.

    route: `flash`, `efficient` or `math`. The tensors are those of the call, [batch, heads,
    length, head size]; capability is the card's. One short reason a rule that is not met.

    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `can_use_flash_attention` and
    `can_use_mem_efficient_attention`, with the checks of ../sdp_utils_cpp.h, which are the same in
    PyTorch 2.11 to 2.13; without the rules for nested tensors. On Hopper and Blackwell recent
    builds ask cuDNN's kernel first, which is not told apart here: seen on an H100, it keeps what
    flash keeps, and its backward takes as much scratch; with a mask it makes one copy of it where
    the efficient kernel makes two. Raises ValueError for another route.
    """
    if route not in SDPA_ROUTES:
        raise ValueError(f"route is {route!r}: allowed are {', '.join(SDPA_ROUTES)}")
    reasons = [] if SDPA_ROUTES[route]() else ["switched off by sdpa_kernel"]
    if route == "math":
        return reasons
    reasons += _wrong_dtypes(route, query, key, value, capability)
    if {query.dim(), key.dim(), value.dim()} != {4}:
        return [*reasons, f"the query has {query.dim()} dimensions: allowed are 4"]
    reasons += _wrong_shapes(route, query, key, value, attn_mask, enable_gqa)
    sizes = query.size(-1), key.size(-1), value.size(-1)
    if route == "flash":
        if capability < (8, 0):
            given = "{}.{}".format(*capability)
            reasons.append(f"compute capability is {given}: allowed are 8.0 and later")
        if attn_mask is not None:
            reasons.append("attn_mask is given: allowed are None and is_causal")
        if len(set(sizes)) > 1 or sizes[0] > 256:
            reasons.append(f"head sizes are {sizes}: allowed are equal ones up to 256")
        if is_causal and query.size(-2) != key.size(-2):
            reasons.append("is_causal with unequal lengths: allowed are equal ones")
        trains = any(x.requires_grad for x in (query, key, value)) and torch.is_grad_enabled()
        small = card_class(capability) == "small"
        if trains and small and (192 < sizes[0] <= 224 or (sizes[0] > 224 and dropout_p > 0)):
            given = "{}.{}".format(*capability)
            reasons.append(f"head size is {sizes[0]}: training on {given} allows up to 192")
        return reasons
    half = query.dtype in (torch.float16, torch.bfloat16)
    multiple = (8 if half else 4) if capability >= (8, 0) else (8 if half else 1)
    if sizes[0] != sizes[1] or any(size % multiple for size in sizes):
        reasons.append(f"head sizes are {sizes}: allowed are multiples of {multiple}")
    return reasons


def _wrong_dtypes(route, query, key, value, capability) -> list[str]:
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
    batches = query.size(0), key.size(0), value.size(0)
    if len(set(batches)) > 1:
        reasons.append(f"batch sizes are {batches}: allowed are equal ones")
    heads = query.size(1), key.size(1), value.size(1)
    shares = enable_gqa and route in SHARES_KEYS
    grouped = shares and heads[1] == heads[2] and heads[0] % heads[1] == 0
    if len(set(heads)) > 1 and not grouped:
        allowed = "key heads that divide the query's" if shares else "equal ones"
        reasons.append(f"heads are {heads}: allowed are {allowed}")
    if 0 in (query.size(-2), key.size(-2)):
        reasons.append("a length is 0: allowed are lengths from 1")
    if {query.stride(-1), key.stride(-1), value.stride(-1)} != {1}:
        reasons.append("the last dimension is not contiguous")
    if attn_mask is not None and attn_mask.stride(-1) != 1:
        reasons.append("the last dimension of attn_mask is not contiguous")
    return reasons


# In the order in which CUDA tries them; whether `torch.nn.attention.sdpa_kernel` leaves them on.
SDPA_ROUTES = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


def kernels_that_share_keys(release: str) -> set[str]:
    """The fused kernels that take fewer key heads than query heads in a release of PyTorch.

    PyTorch 2.13's documentation of the function: "currently works only for Flash_attention and math
    kernel on CUDA tensor". Since 2.14 the memory-efficient one does, too (pytorch/pytorch#191085).
    Seen on a T4: math for shared keys, memory-efficient for repeated ones
    (huggingface/transformers#45776, comment of 2026-08-09).
    """
    return {"flash", "efficient"} if TorchVersion(release) >= "2.14" else {"flash"}


SHARES_KEYS = kernels_that_share_keys(torch.__version__)


def sdpa_route(query, key, value, **call) -> str:
    """The route that `scaled_dot_product_attention` takes on CUDA: the first that can.

    call: the further arguments of `sdpa_refusals`. Raises RuntimeError with PyTorch's message,
    after a warning with the reasons, if none can.
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
    """The routes of a model's attention: without a mask, and with one.

    What of a card decides how attention is computed: for sums of bytes, cards are of one class
    where these are the same.

    dtype: of query, key and value. shares_keys: whether there are fewer key heads than query
    heads; transformers passes them as they are where there is no mask and heads have up to 256
    numbers, and else repeats them (transformers/integrations/sdpa_attention.py,
    `use_gqa_in_sdpa`). size: of a head. capability: the card's.
    """

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
    """Attention as CUDA's flash and memory-efficient kernels run it: no matrix of weights kept.

    gpu: the `memlab.gpus.GPU` whose route counts.

    aten/src/ATen/native/transformers/attention.cpp, `scaled_dot_product_attention`. The kernels of
    `SHARES_KEYS` take fewer key heads than query heads as they are, math repeats them. For flash
    head sizes are padded to multiples of 8.
    """
    _validate(query, key, value, attn_mask)
    call = {
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "enable_gqa": enable_gqa,
        "capability": gpu.capability,
    }
    route = sdpa_route(query, key, value, **call) if is_simulated(query) else "math"
    if route == "math":
        return torch._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if route == "flash":
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
    keeps_lse = query.requires_grad or key.requires_grad or value.requires_grad
    return torch._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keeps_lse, dropout_p, is_causal, scale=scale
    )[0]


def _validate(query, key, value, attn_mask) -> None:
    """Raise what `validate_sdpa_input` raises for dtypes: aten/.../transformers/attention.cpp."""
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
    """The mask in the query's dtype, a row for each query, its rows in eights in memory."""
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
    attn_mask = attn_mask.to(query.dtype)
    columns = key.size(-2)
    if columns % 8 and attn_mask.size(-1) == columns:  # `preprocess_mask`
        attn_mask = torch.nn.functional.pad(attn_mask, (0, 8 - columns % 8))[..., :columns]
    return attn_mask.expand(*query.shape[:-1], columns)


KERNELS = [
    Kernel("attention", "scaled_dot_product_attention", scaled_dot_product_attention, of_card=True)
]
