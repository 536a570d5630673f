"""One serving: which model generates text, and how. For inference, what a `Recipe` is to training.

Each field carries its meaning, its allowed values and the name of its option.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from memlab.fields import (
    CheckedFields,
    Needs,
    documentation,
    field,
    integer_from,
    invalid_value,
    switch,
)
from memlab.spec.recipe import FOUR_BITS, Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from memlab.models import Model

PLAIN = ("fp32", "fp16", "bf16")  # formats of weights that are not quantized
TASKS = ("causal-lm", "seq2seq-lm")  # of the models that write text
# Help texts of the fields that a `Serving` shares with a `Recipe`.
_HELP = {spec.name: spec.metadata["help"] for spec in fields(Recipe)}


@dataclass(frozen=True)
class Serving(CheckedFields):
    """Everything that decides the memory of generating text with a model on one GPU.

    The model's config decides whether the cache slides: with a `sliding_window`, transformers keeps
    no more tokens than that. Raises ValueError in one line that names the field, the value and what
    is allowed.
    """

    model: Model = field("llama-3-8b", _HELP["model"])
    prompt: int = field(
        512,
        "tokens per prompt; for an encoder-decoder, of the encoder's input",
        check=integer_from(1),
    )
    new_tokens: int = field(
        16,
        "tokens to generate after the prompt; the prefill produces the first",
        check=integer_from(1),
    )
    batch_size: int = field(1, "texts generated at a time", check=integer_from(1))
    weights: str = field(
        "fp16",
        "format of the weights",
        {
            "fp32": "",
            "fp16": "",
            "bf16": "",
            "int8": "bitsandbytes' LLM.int8 in all linear layers but the head",
            "nf4": "bitsandbytes' 4-bit NF4 in the same layers",
        },
    )
    compute_dtype: Any = field(  # a str once the serving is made
        None,
        "format of products and of what is not quantized; None takes that of the weights, or fp16",
        ("fp32", "fp16", "bf16", None),
    )
    attention: str = field("sdpa", "transformers' implementation", ("eager", "sdpa"))
    cache: str = field(
        "dynamic",
        "transformers' class for cached keys and values",
        {
            "dynamic": "a new tensor per step, one token longer",
            "static": "allocated for the whole text at the start",
            "fp8": "QuantizedCache with its fp8 backend, 8 bits per number",
            "none": "no cache: every step recomputes the whole text",
        },
    )
    all_logits: bool = switch(False, "logits of every prompt token, as in a plain forward pass")
    expandable_segments: bool = switch(False, _HELP["expandable_segments"])
    double_quant: bool = switch(
        True,
        "quantize the scales of 4-bit blocks to 8 bits",
        ("no_double_quant", "keep the scales of 4-bit blocks in fp32, bitsandbytes' own default"),
        needs=Needs("weights", FOUR_BITS.__contains__, "weights nf4"),
    )

    # Fields of a `Recipe` that code for both kinds of workload reads: quantized bases, simulations,
    # and logs of deep models.
    precision: ClassVar[str] = ""
    optimizer: ClassVar[str] = ""
    optimizer_offload: ClassVar[str] = "none"
    loss: ClassVar[str] = "whole"
    accumulation: ClassVar[int] = 1
    lora_rank: ClassVar[int] = 0
    freeze: ClassVar[tuple[int | str, ...]] = ()
    ranks: ClassVar[int] = 1
    sharding: ClassVar[str] = ""
    lora_fp32: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_fields()
        plain = self.weights if self.weights in PLAIN else None
        if self.compute_dtype is None:
            object.__setattr__(self, "compute_dtype", plain or "fp16")
        elif plain and self.compute_dtype != plain:
            raise invalid_value(
                "compute_dtype", self.compute_dtype, f"{plain}, that of the weights"
            )
        from memlab import models  # imported here, because `memlab --help` needs no catalogue
        from memlab.spec.published import check_published

        object.__setattr__(self, "model", models.catalogued(self.model))
        check_published(self)
        if self.task not in TASKS:
            raise ValueError(
                f"model is {self.model_name!r}, whose task is {self.task}: allowed are models that "
                f"generate text, by {' or '.join(TASKS)}"
            )
        if self.cache == "fp8" and getattr(models.settings(self.model), "sliding_window", None):
            raise ValueError(
                f"cache is 'fp8' and {self.model_name} has a sliding window: transformers "
                "quantizes full attention only, allowed are dynamic, static, none"
            )
        longest = models.max_length(self.model)
        if longest is not None and self.prompt + self.new_tokens > longest:
            raise ValueError(
                f"prompt and new_tokens are {self.prompt} + {self.new_tokens}: {self.model_name} "
                f"allows up to {longest} together"
            )

    @property
    def task(self) -> str:
        """The usual task of the architecture: causal-lm or seq2seq-lm."""
        from memlab import models

        return models.default_task(self.model)

    @property
    def base(self) -> str:
        """The quantized format of the linear layers, as in `Recipe.base`; `none` without one."""
        return "none" if self.weights in PLAIN else self.weights

    def but(self, **changes: Any) -> Serving:
        """The same serving with some fields changed.

        With other weights, `compute_dtype` becomes their usual one, unless it is changed, too.
        """
        if "weights" in changes:
            changes = {"compute_dtype": None} | changes
        return super().but(**changes)


Serving.__doc__ = f"{Serving.__doc__}\n{documentation(Serving)}\n"
Workload = Recipe | Serving  # what memlab can simulate


def head_shape(config: PretrainedConfig) -> tuple[int, int]:
    """(key-value heads, size of a head) of a config's decoder.

    Raises ValueError if the layers do not all have the same.
    """
    if config.is_heterogeneous:
        raise ValueError(f"{config.model_type}: its layers have heads of different sizes")
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)  # d_kv is T5's
    return getattr(
        config, "num_key_value_heads", None
    ) or heads, size or config.hidden_size // heads


def cached_shapes(config: PretrainedConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """(heads, size) of the two tensors that a decoder layer caches for each token.

    These are keys and values. With latent attention they are one compressed vector and one rotary
    key, which all heads share (MLA: DeepSeek-AI 2024, DeepSeek-V2, section 2.1).
    """
    if getattr(config, "kv_lora_rank", None):
        return (1, config.kv_lora_rank), (1, config.qk_rope_head_dim)
    return head_shape(config), head_shape(config)
