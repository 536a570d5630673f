"""Models that are published with quantized weights: only that very base can be asked for."""

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
    """The `quantization_config` of a model's config.json; empty if it has none."""
    quantization = getattr(models.published(model), "quantization_config", None) or {}
    return quantization if isinstance(quantization, dict) else quantization.to_dict()


def check_published(asked: Workload) -> None:
    """Raise ValueError if a model's published weights are quantized in another way than asked.

    bitsandbytes' formats are allowed if the recipe asks for the same base and double quantization.
    Weights quantized by any other method are refused.
    """
    quantization = quantization_of(asked.model)
    if not quantization:
        return
    text = f"{asked.model_name} is published quantized, by {quantization.get('quant_method')}"
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        base, doubled = "int8", False
        if quantization.get("load_in_4bit"):
            # transformers' BitsAndBytesConfig has fp4 as the default of bnb_4bit_quant_type.
            base = quantization.get("bnb_4bit_quant_type", "fp4")
            doubled = bool(quantization.get("bnb_4bit_use_double_quant"))
        base += DOUBLE * doubled
        wanted = asked.base + DOUBLE * (asked.base in FOUR_BITS and asked.double_quant)
        if wanted == base:
            return
        raise ValueError(f"{text} as {base}: allowed is that base, not {wanted}")
    raise ValueError(
        f"{text}: allowed are unquantized models, or a config.json without its quantization_config"
    )
