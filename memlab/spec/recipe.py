"""One training recipe: which model is trained, and how. A recipe is a value and runs nothing.

Each field carries its meaning, its allowed values and the name of its option. The docstring of
`Recipe`, the options of the `memlab` command and the words of the recorded grid are made from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memlab.fields import (
    MOST_MICRO_BATCHES,
    CheckedFields,
    Needs,
    documentation,
    field,
    fraction,
    from_zero,
    integer_from,
    model_parts,
    module_names,
    one_of,
    switch,
)
from memlab.spec.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from memlab.models import Model

# precision -> the number format of its matrix products
COMPUTED_IN = {
    "fp32": "fp32",
    "fp16-amp": "fp16",
    "bf16-amp": "bf16",
    "fp16": "fp16",
    "bf16": "bf16",
}


FULLY_SHARDED = ("zero2", "zero3")  # by FSDP2's fully_shard
FOUR_BITS = ("nf4", "fp4")
QUANTIZED = (*FOUR_BITS, "int8")
AUTOCAST = ("fp16-amp", "bf16-amp")
# What another field must be for a field to have an effect.
ADAPTERS = Needs("lora_rank", bool, "a lora_rank from 1")
AGAIN = ("non-reentrant", True)  # `but` checks a change before True has become "non-reentrant"
RECOMPUTED = Needs("checkpointing", AGAIN.__contains__, "checkpointing non-reentrant")
BASE = Needs("base", QUANTIZED.__contains__, "a base of nf4, fp4 or int8")
BASE_OF_FOUR_BITS = Needs("base", FOUR_BITS.__contains__, "a base of nf4 or fp4")


@dataclass(frozen=True)
class Recipe(CheckedFields):
    """Everything that decides the memory of one training run, on one GPU or on each of several.

    Label smoothing is not supported.
    Raises ValueError in one line that names the field, the value and what is allowed.
    """

    model: Model = field(
        "bert-large",
        "a name in `memlab.models.MODELS`, a path to a config.json, a hub name, or in Python a "
        "transformers PretrainedConfig or a dictionary of its values",
    )
    task: Any = field(  # a str once the recipe is made
        None,
        "sequence-classification, causal-lm, masked-lm or seq2seq-lm; by default the model's "
        "usual one",
    )
    batch_size: int = field(1, "sequences per micro-batch and rank", check=integer_from(1))
    seq_len: int = field(512, "tokens per sequence, padding included", check=integer_from(1))
    accumulation: int = field(
        1,
        "micro-batches per optimizer step; the effective batch is batch_size * accumulation * "
        "ranks",
        check=integer_from(1, MOST_MICRO_BATCHES),
    )
    precision: str = field(
        "fp32",
        "number formats",
        {
            "fp32": "everything",
            "fp16-amp": "fp32 parameters under autocast, with loss scaling",
            "bf16-amp": "fp32 parameters under autocast",
            "fp16": "parameters, gradients and states, without loss scaling",
            "bf16": "parameters, gradients and states",
        },
    )
    optimizer: str = field(
        "adamw_torch",
        "name of the optimizer, as in the Trainer",
        {name: optimizer.help for name, optimizer in OPTIMIZERS.items()},
    )
    optimizer_offload: str = field(
        "none",
        "AdamW on the host with torchao's CPUOffloadOptimizer, which keeps a copy of the trained "
        "weights, their gradients and states in pinned host memory; weights with fewer than 4,096 "
        "elements stay on the GPU",
        {
            "none": "",
            "states": "gradients stay on the GPU until zero_grad",
            "gradients": "each gradient is freed once it is on the host; no accumulation",
        },
    )
    checkpointing: str | bool = field(
        "none",
        "activation checkpointing of every layer; if no form is named, it is non-reentrant, which "
        "PyTorch recommends",
        ("none", "reentrant", "non-reentrant"),
        bare="non-reentrant",
    )
    activation_offload: bool = switch(
        False,
        "keep the checkpointed inputs of layers in pinned host memory: transformers' "
        "activation_checkpointing_enable(offload=True); its copies delay kernels",
        needs=RECOMPUTED,
    )
    attention: str = field(
        "eager",
        "transformers' implementation",
        {
            "eager": "computes all attention scores",
            "sdpa": "the kernel that PyTorch chooses",
            "flash_attention_2": "flash-attn, in half precision only; packed texts then come as "
            "one row of batch_size * seq_len tokens, with boundaries instead of a mask",
        },
    )
    loss: str = field(
        "whole",
        "how a causal language model computes its logits for the cross-entropy",
        {
            "whole": "all at once, as in the model's own forward pass",
            "chunked": "256 tokens at a time, each part under a checkpoint: TRL's default, "
            "but with products in the model's format",
            "linear_cross_entropy": "torch.nn.functional.linear_cross_entropy, PyTorch 2.13 or "
            "later",
        },
    )
    set_to_none: bool = switch(
        True,
        "zero_grad frees the gradients, PyTorch's default since 2.0",
        ("keep_gradients", "zero_grad fills gradients with zeros, as it did before PyTorch 2.0"),
    )
    step_in_backward: bool = switch(
        False,
        "each parameter has its own optimizer, which steps and frees the gradient as soon as it is "
        "computed: torchtune's optimizer_in_bwd",
    )
    max_grad_norm: float = field(
        0.0,
        "largest total norm of the gradients, for torch.nn.utils.clip_grad_norm_; 0 turns clipping "
        "off",
        check=from_zero,
    )
    freeze: tuple[int | str, ...] | str = field(
        (),
        "what is not trained: embeddings, a number of first layers, backbone (all but the head), "
        'or names of modules; a tuple, or a text with commas such as "embeddings,2"; the optimizer '
        "gets only the rest",
        check=model_parts,
    )
    lora_rank: int = field(
        0,
        "rank of peft's LoRA adapters, 0 for none; everything else is frozen except a "
        "classification head",
        check=integer_from(0),
    )
    lora_targets: tuple[str, ...] | str = field(
        "all-linear",
        "names of the linear modules that get adapters, as a tuple or a text with commas; "
        "all-linear means all but the head",
        check=module_names,
        needs=ADAPTERS,
    )
    lora_dropout: float = field(
        0.0, "dropout on the adapters' input, from 0 to below 1", check=fraction, needs=ADAPTERS
    )
    lora_fp32: bool = switch(
        True,
        "keep adapters in fp32 even if the model is in half precision, as peft does by default",
        ("lora_half", "keep adapters in the model's dtype"),
        needs=ADAPTERS,
    )
    base: str = field(
        "none",
        "format of the frozen model under LoRA",
        {
            "none": "that of `precision`",
            "half": "the half precision of autocast, with adapters in fp32",
            "nf4": "linear layers except the head in bitsandbytes' 4-bit NF4",
            "fp4": "the same layers in FP4",
            "int8": "the same layers in LLM.int8, with transformers' outlier threshold",
        },
    )
    double_quant: bool = switch(
        False, "quantize the scales of 4-bit blocks to 8 bits", needs=BASE_OF_FOUR_BITS
    )
    compute_dtype: str | None = field(
        None,
        "format in which a quantized base is loaded and multiplied; None takes the half precision "
        "of `precision`, or fp32",
        ("fp32", "fp16", "bf16", None),
        needs=BASE,
    )
    upcast: bool = switch(
        True,
        "cast what is not quantized (norms, embeddings, head) to fp32, as peft's "
        "prepare_model_for_kbit_training does",
        ("no_upcast", "leave what is not quantized in the compute dtype"),
        needs=BASE,
    )
    padded: bool = switch(
        False,
        "batches have an attention mask, as for texts of unequal length; the last token of every "
        "sequence is padding",
    )
    packed: bool = switch(
        False,
        "a row holds several texts (two here), separated by position_ids as in TRL's packing; "
        "under eager and sdpa the model masks them, whatever their number",
    )
    expandable_segments: bool = switch(
        False,
        "let segments of PyTorch's allocator grow in place: "
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
    )
    ranks: int = field(
        1,
        "processes that train together, each on its own GPU; all results are for one rank",
        check=integer_from(1),
    )
    sharding: str = field(
        "ddp",
        "what the ranks split; gradients are reduced after the last micro-batch, as in Accelerate "
        "and the Trainer",
        {
            "ddp": "nothing; DistributedDataParallel reduces the gradients in buckets",
            "zero1": "optimizer states: ZeroRedundancyOptimizer with DistributedDataParallel",
            "zero2": "states, gradients and parameters; parameters stay gathered from a layer's "
            "forward to its backward pass: fully_shard with reshard_after_forward=False; autocast "
            "becomes fully_shard's mixed precision policy, as in zero3",
            "zero3": "as zero2, but parameters are gathered again for the backward pass: "
            "fully_shard",
        },
    )
    replicas: int = field(
        1, "copies of the model, each split by zero2 or zero3: HSDP", check=integer_from(1)
    )

    def __post_init__(self) -> None:
        from memlab import models  # imported here, because `memlab --help` needs no catalogue
        from memlab.spec.combinations import OF_FIELDS, OF_MODEL
        from memlab.spec.published import check_published

        self.check_fields()
        # The dataclass is frozen, so fields get their final form by object.__setattr__.
        if self.compute_dtype is None and self.base in QUANTIZED:
            object.__setattr__(self, "compute_dtype", COMPUTED_IN[self.precision])
        for check in OF_FIELDS:
            check(self)
        # A name of any spelling becomes the catalogue's; a dictionary of values becomes a config.
        named = models.catalogued(self.model)
        named = models.published(named) if isinstance(named, dict) else named
        object.__setattr__(self, "model", named)
        check_published(self)
        if self.task is None:
            object.__setattr__(self, "task", models.default_task(self.model))
        one_of("task", self.task, models.TASKS)
        for check in OF_MODEL:
            check(self)
        longest = models.max_length(self.model)
        if longest is not None and self.seq_len > longest:
            raise ValueError(
                f"seq_len is {self.seq_len}: {self.model_name} allows whole numbers from 1 to "
                f"{longest}"
            )

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with some fields changed: `recipe.but(batch_size=1, accumulation=4)`.

        A field that the changes leave without an effect goes back to its default. With another
        model, the task becomes that model's usual one, unless it is changed, too.
        """
        if "model" in changes:
            changes = {"task": None} | changes
        return super().but(**changes)

    def twin(self, **changes: Any) -> Recipe:
        """The same recipe on the model's tiny twin, which is small enough to measure on a laptop.

        Sequences are cut to 128 tokens, unless `changes` sets another length.
        """
        from memlab import models

        named = isinstance(self.model, str) and f"{self.model}-tiny" in models.MODELS
        tiny = f"{self.model}-tiny" if named else models.twin(self.model)
        changes = {"model": tiny, "task": self.task, "seq_len": min(self.seq_len, 128)} | changes
        return self.but(**changes)

    def training_arguments(self, output_dir: str = "output", **more: Any) -> TrainingArguments:
        """The same recipe as `transformers.TrainingArguments`, for the `Trainer`.

        more: further arguments. SGD gets a momentum of 0.9 unless `optim_args` is among them; the
        Trainer's own default is none.

        Raises ValueError for what the Trainer does not do. It always drops gradients
        (`set_to_none`), steps after the backward pass, keeps optimizer states on the GPU, and takes
        the model's own loss. Its `adamw_torch` lets PyTorch choose the step, so there is no
        `adamw_torch_loop`.
        """
        from transformers import TrainingArguments

        from memlab.spec.combinations import check_trainer

        check_trainer(self)
        if self.optimizer == "adamw_torch_loop":
            others = ", ".join(name for name in OPTIMIZERS if name != self.optimizer)
            raise ValueError(
                "optimizer is 'adamw_torch_loop': the Trainer lets PyTorch choose the step, "
                f"allowed are {others}"
            )
        if self.optimizer == "sgd":
            more.setdefault("optim_args", "momentum=0.9")
        if self.checkpointing != "none":
            asked = {"use_reentrant": self.checkpointing == "reentrant"}
            asked |= {"offload": True} if self.activation_offload else {}
            more |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": asked}
        return TrainingArguments(
            output_dir=output_dir,
            per_device_train_batch_size=self.batch_size,
            gradient_accumulation_steps=self.accumulation,
            fp16=self.precision == "fp16-amp",
            bf16=self.precision == "bf16-amp",
            optim=self.optimizer,
            max_grad_norm=self.max_grad_norm,  # the Trainer's own default is 1
            report_to="none",
            **more,
        )


Recipe.__doc__ = f"{Recipe.__doc__}\n{documentation(Recipe)}\n"


def is_moved_by_sharding(recipe: Recipe) -> bool:
    """Whether the model is made on the host, and moved to the GPU and sharded layer by layer.

    `memlab.workloads.sharding.share` does both.
    """
    return recipe.ranks > 1 and recipe.sharding in FULLY_SHARDED
