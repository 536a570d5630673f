"""The functions of the package flash-attn, as transformers calls them, on a card that is not there.

`attn_implementation="flash_attention_2"` asks for a package that is built for CUDA alone. PyTorch
holds a copy of its kernels, in aten/src/ATen/native/transformers/cuda/flash_attn, which takes and
keeps the same; here it stands for the package, whether that is installed or not. What transformers
does around the kernels is its own code: it cuts padding out, and finds where texts of a row begin.
"""

import contextlib

import torch
from torch.nn import functional
from transformers import modeling_flash_attention_utils, modeling_utils

from memlab.card.placement import NotSimulated
from memlab.trace.patches import replaced

NAME = "flash_attention_2"
LARGEST_HEAD = 256  # csrc/flash_attn/flash_api.cpp, `mha_fwd`


@contextlib.contextmanager
def flash_attention_2():
    """Let transformers find flash-attn 2 on the card."""
    matrix = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    available = matrix | {2: matrix[2] | {"general_availability_check": lambda: True}}
    # What transformers has found so far, and what it will find.
    loaded = (
        "_loaded_implementation",
        "_flash_fn",
        "_flash_varlen_fn",
        "_flash_with_kvcache_fn",
        "_pad_fn",
        "_unpad_fn",
        "_process_flash_kwargs_fn",
        "_process_with_kvcache_kwargs_fn",
    )
    rows: list[tuple] = [(modeling_flash_attention_utils, name, None) for name in loaded]
    rows += [(modeling_flash_attention_utils, "_lazy_imports", _functions)]
    rows += [(modeling_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", available)]
    with replaced(*rows):
        yield


_original_imports = modeling_flash_attention_utils._lazy_imports


def _functions(implementation, *args, **kwargs):
    """For dense and for ragged batches, for a paged cache, to pad and to cut padding out."""
    if implementation != NAME:
        return _original_imports(implementation, *args, **kwargs)
    padding = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
    return flash_attn_func, flash_attn_varlen_func, None, *padding


def flash_attn_func(q, k, v, **how):
    """Attention of [batch, length, heads, head size]; the result has the query's shape.

    how: as of `flash_attn_varlen_func`, and the same errors.
    """
    return flash_attn_varlen_func(q, k, v, None, None, q.size(1), k.size(1), **how)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
):
    """Attention of [tokens, heads, head size]: all sequences, one behind the other.

    cu_seqlens: where each begins, and the end, int32. max_seqlen: the longest. transformers reads
    from these names what flash-attn can do; softcap changes values and no shape.

    Raises RuntimeError in the package's words for what it does not take, of cards and dtypes as
    `memlab.card.refusals` does, and NotSimulated for deterministic, which takes more memory.
    """
    if deterministic:
        raise NotSimulated("flash-attn with deterministic=True: its memory is not simulated")
    size = q.size(-1)
    if size > LARGEST_HEAD:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if size % 8:
        q, k, v = (functional.pad(x, (0, 8 - size % 8)) for x in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        dropout_p,
        causal,
        False,
        scale=size**-0.5 if softmax_scale is None else softmax_scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
    )[0]
    return out[..., :size] if size % 8 else out
