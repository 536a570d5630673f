"""Whether a causal language model's logits are its last hidden states times its head's weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from memlab import models

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from memlab.models import Model

TOKENS = 3


def unlike_product(model: Model) -> str:
    """Why a causal model's loss is not that of its last hidden states times its head's weight.

    Empty where it is. Logits may be scaled or capped (Cohere, Gemma 2), the head may have layers of
    its own (RoBERTa's), a router may add to the loss. A forward pass of two layers says so, on
    tensors that have shapes only, or with data on a tiny twin where shapes follow from values.
    """
    key = models.config(model).to_json_string(use_diff=False)
    if key not in _KNOWN:
        with torch.random.fork_rng(devices=[]):
            try:
                _KNOWN[key] = _unlike(models.with_layers(model, 2), "meta")
            except (NotImplementedError, RuntimeError):
                _KNOWN[key] = _unlike(models.twin(model), "cpu")
    return _KNOWN[key]


_KNOWN: dict[str, str] = {}  # by config


def _unlike(config: PretrainedConfig, device: str) -> str:
    if getattr(config, "output_router_logits", False):
        return "its router adds to the loss"
    with torch.device(device), torch.no_grad():
        built = models.build(config, "causal-lm").eval()
        head = built.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            return "its head is no linear layer"
        if built.loss_function is not ForCausalLMLoss:
            return "its loss is one of its own"
        seen: dict[str, Any] = {}
        head.register_forward_hook(lambda _, given, made: seen.update(given=given[0], made=made))
        built.base_model.register_forward_hook(
            lambda _, given, made: seen.update(hidden=made.last_hidden_state)
        )
        logits = built(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64)).logits
    if not _are_same(seen["given"], seen["hidden"]):
        return "its head is not given the last hidden states"
    if not _are_same(seen["made"], logits) or logits._version:
        return "its logits are changed after the product with the head's weight"
    return ""


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same part of the same storage."""
    alike = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return alike and one.shape == other.shape
