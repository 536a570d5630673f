"""Whether a causal language model's logits are its last hidden states times its head's weight.

Only then can `memlab.workloads.losses` compute the loss in parts, from the hidden states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlab import models
from memlab.libraries import remembered

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from memlab.models import Model

TOKENS = 3  # of the sequence that is tried; any number will do


@remembered
def unlike_product(model: Model) -> str:
    """Why a causal model's loss is not that of its last hidden states times its head's weight.

    Empty if it is. Logits may be scaled or capped (Cohere, Gemma 2), the head may have layers of
    its own (RoBERTa), and a router may add to the loss. One forward pass on the meta device shows
    this. Given hidden states replace the output of the layers: what comes before may depend on
    values, as masks do, and does not matter here.
    """
    import torch

    # Building a model seeds PyTorch's global generator, which is the caller's.
    with torch.random.fork_rng(devices=[]):
        return _unlike(_shallow(model))


def _shallow(model: Model) -> PretrainedConfig:
    """The config with two layers, or with its own number if the family has no such field."""
    try:
        return models.with_layers(model, 2)
    except (AttributeError, ValueError):
        return models.config(model)


class _Hidden(tuple):
    """The output of a model without its head: (last hidden states,), and None by any other name."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def body_of(model: PreTrainedModel) -> torch.nn.Module:
    """A causal language model without its head.

    Llama 4 has `base_model_prefix = "language_model"` and no such attribute, so its `base_model` is
    the whole model (transformers, models/llama4/modeling_llama4.py).
    """
    return model.model if model.base_model is model else model.base_model


def _unlike(config: PretrainedConfig) -> str:
    import torch
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(config, "output_router_logits", False):
        return "its router adds to the loss"
    with torch.device("meta"), torch.no_grad():
        built = models.build(config, "causal-lm").eval()
        head = built.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            return "its head is not a linear layer"
        if built.loss_function is not ForCausalLMLoss:
            return "it has its own loss function"
        hidden = torch.empty(1, TOKENS, head.in_features, dtype=head.weight.dtype)
        # OPT's forward calls `self.model.decoder` and not `self.model`, so both are replaced.
        for body in (body_of(built), getattr(body_of(built), "decoder", None)):
            if isinstance(body, torch.nn.Module):
                body.forward = lambda *_, **__: _Hidden([hidden])
        seen: dict[str, torch.Tensor] = {}
        head.register_forward_hook(
            lambda _, given, output: seen.update(given=given[0], output=output)
        )
        logits = built(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64)).logits
    # The same storage proves that nothing happened in between; `_version` counts in-place changes.
    if "given" not in seen or not _are_same(seen["given"], hidden):
        return "its head does not get the last hidden states"
    if not _are_same(seen["output"], logits) or logits._version:
        return "its logits are changed after the product with the head's weight"
    return ""


def _are_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same part of the same storage."""
    alike = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    return alike and tensor.shape == other.shape
