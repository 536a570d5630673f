"""The functions of the flash-attn package that transformers calls, on the simulated GPU.

`attn_implementation="flash_attention_2"` needs a package that exists for CUDA only. PyTorch has a
copy of its kernels, in aten/src/ATen/native/transformers/cuda/flash_attn, which allocates and saves
the same. That copy replaces the package here, whether it is installed or not. Around the kernels,
transformers runs its own code: it removes padding, and it finds where packed texts begin.

Known limitations: `deterministic=True` is refused, because it allocates more. A script's own
`import flash_attn` is left alone.
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
    """Let transformers find and load flash-attn 2 inside the block."""
    matrix = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    available = matrix | {2: matrix[2] | {"general_availability_check": lambda: True}}
    # The globals in which `lazy_import_flash_attention` keeps what it has loaded. Setting them to
    # None makes it load again, and restores the real package's functions after the block.
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
    """transformers' `_lazy_imports`: (dense, ragged, paged cache, pad, unpad) functions.

    There is no function for a paged cache, which transformers accepts.
    """
    if implementation != NAME:
        return _original_imports(implementation, *args, **kwargs)
    padding = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
    return flash_attn_func, flash_attn_varlen_func, None, *padding


def flash_attn_func(q, k, v, **how):
    """Attention of dense [batch, length, heads, head size]; the result has the query's shape.

    how: the options of `flash_attn_varlen_func`, which raises the same errors.
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
    """Attention of ragged [tokens, heads, head size]: all sequences, concatenated.

    cu_seqlens_q, cu_seqlens_k: int32, the start of each sequence and the end of the last; None for
    a dense batch. max_seqlen_q, max_seqlen_k: length of the longest sequence.

    transformers inspects the names of these parameters to learn which options are supported.
    `softcap` is accepted and ignored, because it changes values only.

    Raises RuntimeError in the package's own words for a head size above 256. For GPUs and dtypes
    that the kernels refuse, `memlab.card.refusals` does the same. Raises NotSimulated for
    `deterministic`, which allocates more memory.
    """
    if deterministic:
        raise NotSimulated("flash-attn with deterministic=True: its memory is not simulated")
    size = q.size(-1)
    if size > LARGEST_HEAD:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if size % 8:
        # The kernels want head sizes in multiples of 8. Padded copies are saved for the backward.
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
        False,  # return_debug_mask
        scale=size**-0.5 if softmax_scale is None else softmax_scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
    )[0]
    return out[..., :size] if size % 8 else out
