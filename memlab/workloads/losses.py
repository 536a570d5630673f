"""Losses of a causal language model that never hold the logits of all tokens at once.

The model's own forward pass multiplies every hidden state by the head's weight. It copies the
logits to fp32 and keeps log-probabilities of the same size for the backward pass. The losses here
compute the same loss and the same gradients from the last hidden states. They need a model whose
logits are exactly that product (`memlab.spec.logits.unlike_product`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from memlab.spec.logits import body_of
from memlab.spec.recipe import Recipe

# Tokens per chunk: TRL's `_CHUNKED_LM_HEAD_CHUNK_SIZE`, which TRL chose by a sweep of memory
# against throughput (huggingface/trl#5575).
CHUNK = 256
IGNORED = -100  # the label that the loss ignores, as in transformers and PyTorch


def replace_loss(model: torch.nn.Module, recipe: Recipe) -> None:
    """Make the forward pass of a causal language model return the recipe's loss without logits.

    Like TRL, this replaces the `forward` of the bare model, before adapters and ranks wrap it. The
    head is looked up at each call, because peft may have wrapped the head too.
    """
    if recipe.loss != "whole":
        model.forward = functools.partial(_forward, model, LOSSES[recipe.loss])


def _forward(
    model: Any,
    loss: Callable[..., torch.Tensor],
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    **inputs: Any,
) -> CausalLMOutput:
    hidden = body_of(model)(input_ids=input_ids, **inputs).last_hidden_state
    # The tokens up to n - 1 predict token n. No token follows the last one: its label is ignored.
    labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
    head = model.get_output_embeddings()
    return CausalLMOutput(loss=loss(hidden.reshape(-1, hidden.size(-1)), head, labels))


def chunked(hidden: torch.Tensor, head: torch.nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss over all tokens, computed from `CHUNK` tokens at a time.

    hidden: [tokens, hidden size]. labels: [tokens].

    Each chunk runs under a checkpoint. It keeps its hidden states, and the backward pass computes
    its logits again, so only one chunk's logits exist at a time.
    """
    parts = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    sums = [checkpoint(_sum_of_part, head, *part, use_reentrant=False) for part in parts]
    return sum(sums) / (labels != IGNORED).sum()


def _sum_of_part(head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = head(hidden).float()
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def linear_cross_entropy(
    hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor
) -> torch.Tensor:
    """The mean loss over all tokens by `torch.nn.functional.linear_cross_entropy` (PyTorch 2.13).

    hidden: [tokens, hidden size]. labels: [tokens].

    PyTorch's function computes the gradients in the forward pass, one chunk of tokens after the
    other. The options are the defaults, so `LinearCrossEntropyOptions.chunking_method` chooses the
    chunks. Autocast does not know the operator: it computes in the dtype of the head's weight.

    Raises ValueError for a head with adapters, because the function sees only the head's weight.
    """
    _refuse_adapters(head, "linear_cross_entropy")
    # Hidden states may arrive in autocast's dtype, and the operator takes only one dtype.
    return functional.linear_cross_entropy(
        hidden.to(head.weight.dtype),
        head.weight,
        labels,
        linear_bias=head.bias,
        ignore_index=IGNORED,
        options=torch.nn.LinearCrossEntropyOptions(),
    )


def _refuse_adapters(head: torch.nn.Linear, loss: str) -> None:
    if not hasattr(head, "weight") or hasattr(head, "base_layer"):
        raise ValueError(
            f"loss is {loss!r}: it uses the head's weight but no adapters on it, allowed are "
            "whole, chunked, or lora_targets without the head"
        )


LOSSES = {"chunked": chunked, "linear_cross_entropy": linear_cross_entropy}
