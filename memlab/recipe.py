"""One training recipe: which model is trained how. A recipe is a value; it runs nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from memlab import models

PRECISIONS = ("fp32", "fp16-amp", "bf16-amp", "bf16")
# `adamw_torch` is what `torch.optim.AdamW(params)` does on CUDA: the multi-tensor ("foreach")
# step. The plain loop over parameters, PyTorch's choice on a CPU, has a name of its own, because
# the two differ by a whole copy of the gradients.
OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_loop",
    "adamw_torch_fused",
    "sgd",
    "adafactor",
    "adamw_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
)
CHECKPOINTING = ("none", "reentrant", "non-reentrant")
ATTENTION = ("eager", "sdpa")
BASES = ("none", "nf4", "fp4", "int8")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
COMPUTE_DTYPES = {"fp32": "fp32", "fp16-amp": "fp16", "bf16-amp": "bf16", "bf16": "bf16"}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the memory of one training run on one GPU.

    model: a name of `memlab.models.MODELS`, a path to a config.json, a hub name, a transformers
        `PretrainedConfig`, or a dictionary with the values of a config.json.
    task: one of `memlab.models.TASKS`; None takes the model's usual one.
    batch_size: sequences of one micro-batch.
    seq_len: tokens of each sequence, padding included.
    padded: whether batches carry an attention mask, as those of texts of unequal lengths do; the
        last token of every sequence is then padding. Else every token is real.
    accumulation: micro-batches per optimizer step; the effective batch is
        batch_size * accumulation.
    precision: `fp32`; `fp16-amp` and `bf16-amp` (fp32 parameters under autocast, fp16 with loss
        scaling); `bf16` (parameters, gradients and states in bfloat16).
    optimizer: `adamw_torch` (multi-tensor), `adamw_torch_loop`, `adamw_torch_fused`, `sgd`
        (momentum 0.9, multi-tensor), transformers' `adafactor` (a given learning rate, no
        momentum), or bitsandbytes' `adamw_8bit`, `paged_adamw_8bit` and `lion_8bit`, with the
        embeddings' states in 32 bit as the Trainer sets them.
    checkpointing: `none`, `non-reentrant` (every layer, PyTorch's recommended form) or
        `reentrant`. True stands for `non-reentrant`, False for `none`.
    attention: transformers' `eager` or `sdpa`.
    set_to_none: whether `zero_grad` frees the gradients (PyTorch's default since 2.0) or keeps
        them filled with zeros, as trainings did before.

    freeze: what is not trained, a tuple of `embeddings`, a number (that many first layers),
        `backbone` (everything but the head) and names of modules; or one text with commas, as in
        "embeddings,2". The optimizer gets the rest only.

    lora_rank: rank of peft's LoRA adapters, 0 for none; the rest of the model is frozen, but for
        a classification head.
    lora_targets: names of the linear modules that get adapters, a tuple or one text with commas;
        peft's `all-linear` means every one but the head.
    lora_dropout: probability on the adapters' input, from 0 to below 1.
    lora_fp32: adapters in fp32 also where the model is in half precision, as peft does by default.

    base: the frozen linear layers under LoRA as they are (`none`) or in bitsandbytes' `nf4`, `fp4`
        or `int8` (LLM.int8 with transformers' outlier threshold); never the head.
    block_size: weights that share one scale, for 4 bits. double_quant: those scales in 8 bits.
    compute_dtype: `fp32`, `fp16` or `bf16`, in which the base is loaded and its products are
        computed; None takes the half precision of `precision`, or fp32.
    upcast: peft's `prepare_model_for_kbit_training`, which casts what is not quantized (norms,
        embeddings, head) to fp32.

    The loss is the model's own: no label smoothing, no cross-entropy in chunks.

    Raises ValueError in one line that names the field, the value and what is allowed.
    """

    model: Any = "bert-large"
    task: str | None = None
    batch_size: int = 1
    seq_len: int = 512
    accumulation: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw_torch"
    checkpointing: str | bool = "none"
    attention: str = "eager"
    set_to_none: bool = True
    freeze: tuple | str = ()
    lora_rank: int = 0
    lora_targets: tuple | str = "all-linear"
    lora_dropout: float = 0.0
    lora_fp32: bool = True
    base: str = "none"
    block_size: int = 64
    double_quant: bool = False
    compute_dtype: str | None = None
    upcast: bool = True
    padded: bool = False

    def __post_init__(self):
        for field in ("batch_size", "seq_len", "accumulation"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}: allowed are whole numbers from 1")
        if isinstance(self.checkpointing, bool):
            chosen = "non-reentrant" if self.checkpointing else "none"
            object.__setattr__(self, "checkpointing", chosen)
        object.__setattr__(self, "freeze", _frozen_parts(self.freeze))
        self._check_lora()
        if self.compute_dtype is None and self.base != "none":
            object.__setattr__(self, "compute_dtype", COMPUTE_DTYPES.get(self.precision))
        for field, allowed in (
            ("precision", PRECISIONS),
            ("optimizer", OPTIMIZERS),
            ("checkpointing", CHECKPOINTING),
            ("attention", ATTENTION),
            ("padded", (True, False)),
            ("set_to_none", (True, False)),
            ("lora_fp32", (True, False)),
            ("base", BASES),
            ("block_size", BLOCK_SIZES),
            ("double_quant", (True, False)),
            ("compute_dtype", ("fp32", "fp16", "bf16", None)),
            ("upcast", (True, False)),
        ):
            value = getattr(self, field)
            if value not in allowed:
                names = ", ".join(map(str, allowed))
                raise ValueError(f"{field} is {value!r}: allowed are {names}")
        if self.base != "none" and not self.lora_rank:
            raise ValueError(
                f"base is {self.base!r} and lora_rank is 0: a quantized base cannot be trained, "
                "allowed is a lora_rank from 1"
            )
        config = models.config(self.model)
        if isinstance(self.model, dict):
            object.__setattr__(self, "model", config)
        if self.task is None:
            object.__setattr__(self, "task", models.default_task(config))
        if self.task not in models.TASKS:
            raise ValueError(f"task is {self.task!r}: allowed are {', '.join(models.TASKS)}")
        longest = models.max_length(config)
        if longest is not None and self.seq_len > longest:
            raise ValueError(
                f"seq_len is {self.seq_len}: {self.model_name} allows whole numbers from 1 to "
                f"{longest}"
            )

    def _check_lora(self):
        rank, dropout, targets = self.lora_rank, self.lora_dropout, self.lora_targets
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ValueError(f"lora_rank is {rank!r}: allowed are whole numbers from 0")
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"lora_dropout is {dropout!r}: allowed are numbers from 0 to below 1")
        if isinstance(targets, str) and targets != "all-linear":
            targets = tuple(target.strip() for target in targets.split(",") if target.strip())
            object.__setattr__(self, "lora_targets", targets)
        elif not isinstance(targets, str):
            object.__setattr__(self, "lora_targets", tuple(targets))
        if not self.lora_targets or not all(isinstance(t, str) for t in self.lora_targets):
            raise ValueError(
                f"lora_targets is {targets!r}: allowed are all-linear or names of modules"
            )

    @property
    def model_name(self) -> str:
        """The model as a short text for tables."""
        return self.model if isinstance(self.model, str) else self.model.model_type

    def but(self, **changes) -> Recipe:
        """The same recipe with some fields changed: `recipe.but(batch_size=1, accumulation=4)`."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"a recipe has no field {name!r}: allowed are {', '.join(known)}")
        if "model" in changes and "task" not in changes:
            changes["task"] = None  # another model may have another usual task
        return dataclasses.replace(self, **changes)

    def twin(self, **changes) -> Recipe:
        """The same recipe on the model's tiny twin, small enough to measure on a laptop.

        Sequences are cut to 128 tokens, unless `changes` says otherwise.
        """
        if not isinstance(self.model, str) or f"{self.model}-tiny" not in models.MODELS:
            tiny = models.twin(self.model)
        else:
            tiny = f"{self.model}-tiny"
        changes = {"model": tiny, "task": self.task, "seq_len": min(self.seq_len, 128)} | changes
        return self.but(**changes)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        values = dataclasses.asdict(self) if isinstance(self.model, str) else vars(self).copy()
        return values | {"model": self.model_name}

    def training_arguments(self, output_dir: str = "output", **more):
        """The same recipe as `transformers.TrainingArguments`, for `Trainer`.

        The Trainer always drops gradients (`set_to_none`), and its `adamw_torch` lets PyTorch
        choose the step, so a recipe that asks for kept gradients or for the loop raises
        ValueError. Its SGD has no momentum unless told so.
        """
        from transformers import TrainingArguments

        if not self.set_to_none or self.optimizer == "adamw_torch_loop":
            raise ValueError(
                "the Trainer has no set_to_none=False and no adamw_torch_loop: "
                "allowed are set_to_none=True and adamw_torch, adamw_torch_fused, sgd"
            )
        if self.optimizer == "sgd":
            more.setdefault("optim_args", "momentum=0.9")
        if self.checkpointing != "none":
            fields = TrainingArguments.__dataclass_fields__
            # The old name, `gradient`, goes with transformers 6 and warns before.
            name = "activation" if "activation_checkpointing" in fields else "gradient"
            more[f"{name}_checkpointing"] = True
            more[f"{name}_checkpointing_kwargs"] = {
                "use_reentrant": self.checkpointing == "reentrant"
            }
        return TrainingArguments(
            output_dir=output_dir,
            per_device_train_batch_size=self.batch_size,
            gradient_accumulation_steps=self.accumulation,
            fp16=self.precision == "fp16-amp",
            bf16=self.precision == "bf16-amp",
            optim=self.optimizer,
            report_to="none",
            **more,
        )

    def __str__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("model", "task") or value != field.default:
                value = self.model_name if field.name == "model" else value
                shown.append(f"{field.name}={value}")
        return f"Recipe({', '.join(shown)})"


def _frozen_parts(parts) -> tuple:
    """`freeze` in its one form: a tuple of whole numbers and names."""
    if isinstance(parts, str):
        parts = [part.strip() for part in parts.split(",") if part.strip()]
    elif isinstance(parts, int):
        parts = [parts]
    parts = tuple(int(p) if isinstance(p, str) and p.isdigit() else p for p in parts)
    for part in parts:
        number = isinstance(part, int) and not isinstance(part, bool) and part >= 0
        if not number and not (isinstance(part, str) and part[:1] not in "-+"):
            raise ValueError(
                f"freeze holds {part!r}: allowed are embeddings, backbone, a number of layers "
                "from 0, and names of modules"
            )
    return parts
