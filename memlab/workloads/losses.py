"""The loss of a causal language model from its last hidden states, without all logits at once.

The model's own forward multiplies every hidden state with the head's weight, copies the logits to
fp32 and keeps log-probabilities of the same size for the backward pass. The losses here give the
same number and the same gradients.
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

# Tokens of a part. TRL's `_CHUNKED_LM_HEAD_CHUNK_SIZE`, chosen by a sweep of memory against
# throughput: huggingface/trl#5575.
CHUNK = 256
IGNORED = -100  # labels that do not count, as in transformers and PyTorch


def replace_loss(model: torch.nn.Module, recipe: Recipe) -> None:
    """Let the forward pass of a causal language model compute the recipe's loss, and no logits.

    As TRL does it: `forward` of the model itself is replaced, before adapters and ranks wrap it.
    Its head is looked up at each call, because peft may have wrapped that, too.
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
    # Tokens before n predict n, and nothing follows the last one.
    labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
    head = model.get_output_embeddings()
    return CausalLMOutput(loss=loss(hidden.reshape(-1, hidden.size(-1)), head, labels))


def chunked(hidden: torch.Tensor, head: torch.nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of tokens, of `CHUNK` at a time.

    The checkpoint around each part keeps its hidden states and computes its logits again in the
    backward pass.
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
    """PyTorch's own, which chunks and computes the gradients in the forward pass.

    With its default options: chunks of tokens by `LinearCrossEntropyOptions.chunking_method`. It is
    no operation that autocast knows, so it computes in the format of the head's weight.

    Raises ValueError for a head with adapters, which are no part of that weight.
    """
    _refuse_adapters(head, "linear_cross_entropy")
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
            f"loss is {loss!r}: it takes the head's weight and no adapters beside it, allowed are "
            "whole, chunked, or lora_targets without the head"
        )


LOSSES = {"chunked": chunked, "linear_cross_entropy": linear_cross_entropy}
