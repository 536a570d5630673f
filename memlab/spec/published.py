"""Published weights that are quantized already: a base that is asked for is that one or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlab import models
from memlab.libraries import remembered
from memlab.spec.recipe import FOUR_BITS

if TYPE_CHECKING:
    from memlab.spec.serving import Workload

DOUBLE = " with double quantization"


@remembered
def quantization_of(model: models.Model) -> dict[str, Any]:
    """The `quantization_config` of a model's config.json, empty for none."""
    quantization = getattr(models.published(model), "quantization_config", None) or {}
    return quantization if isinstance(quantization, dict) else quantization.to_dict()


def check_published(asked: Workload) -> None:
    """Raise ValueError where a model's published weights are quantized in another way than asked.

    A base of bitsandbytes, as the config.json's `quantization_config` says it, is answered for
    where it is the one that is asked for.
    """
    quantization = quantization_of(asked.model)
    if not quantization:
        return
    text = f"{asked.model_name} is published quantized, by {quantization.get('quant_method')}"
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        base, doubled = "int8", False
        if quantization.get("load_in_4bit"):
            base = quantization.get("bnb_4bit_quant_type", "fp4")
            doubled = bool(quantization.get("bnb_4bit_use_double_quant"))
        base += DOUBLE * doubled
        wanted = asked.base + DOUBLE * (asked.base in FOUR_BITS and asked.double_quant)
        if wanted == base:
            return
        raise ValueError(f"{text} as {base}: allowed is that base, asked is {wanted}")
    raise ValueError(
        f"{text}: allowed are unquantized models, or a config.json without its quantization_config"
    )
