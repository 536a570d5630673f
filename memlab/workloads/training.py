"""Build the training that a recipe describes, and run its optimizer steps.

There is one training loop. It runs on a real device and on the simulated GPU alike; only the device
of the tensors differs. `Training` assembles the model (precision, quantized base, frozen parts,
LoRA, checkpointing, sharding), the optimizer, random micro-batches and the gradient scaler.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers.pytorch_utils import Conv1D

from memlab import models
from memlab.libraries import import_needed
from memlab.spec.optimizers import is_of_bitsandbytes, library_of
from memlab.spec.recipe import (
    QUANTIZED,
    Recipe,
    is_moved_by_sharding,
)
from memlab.trace.quantized_weights import numel
from memlab.workloads import quantized, sharding
from memlab.workloads.losses import replace_loss
from memlab.workloads.optimizers import make_optimizer

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PretrainedConfig, PreTrainedModel

    from memlab.spec.serving import Workload

Batch = dict[str, torch.Tensor]
AUTOCAST = {"fp16-amp": torch.float16, "bf16-amp": torch.bfloat16}


class NoAdapters(ValueError):
    """peft cannot add adapters at the requested targets of this model, whatever the rank."""


class Training:
    """A model, its optimizer and one optimizer step's micro-batches, ready to `step()`.

    device: the device that everything lives on, a torch device or its name.
    seed: the seed of the weights, the data and the dropout.
    built_in: a context in which the model is initialised before it moves to `device`. On a GPU a
        large model is initialised in seconds, on the host in minutes. A quantized base needs None:
        it is initialised on the host and loaded from there, as `from_pretrained` loads a file
        (`quantized.load`).

    With several ranks this object is one of them. It joins their process group
    (`memlab.workloads.sharding`).

    Attributes: `model` (torch.nn.Module), `optimizer` (torch.optim.Optimizer, or
    `memlab.workloads.optimizers.StepsInBackward`) and `scaler` (torch.amp.GradScaler, enabled for
    fp16-amp only). `batches` is a list of `recipe.accumulation` dictionaries of int64 tensors;
    input_ids has shape [batch_size, seq_len].
    """

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device | str = "cpu",
        seed: int = 0,
        built_in: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self.recipe, self.device = recipe, torch.device(device)
        rank = sharding.join_ranks(recipe)
        config = models.config(recipe.model)
        dtype = stored_as(recipe)
        self._sharded, quantizes = is_moved_by_sharding(recipe), recipe.base in QUANTIZED
        # Under fully_shard the mixed precision policy takes the place of autocast (`autocast`).
        half = AUTOCAST.get(recipe.precision) if self._sharded else None
        # FSDP casts floating-point weights when it gathers them, which would spoil packed 4-bit
        # weights. Stored in the very dtype that FSDP casts to, they pass unchanged.
        storage = [half or dtype] if self._sharded else []
        with built_in or contextlib.nullcontext():
            model = models.build(config, recipe.task, dtype, recipe.attention, seed)
            if quantizes:
                quantized.quantize_base(model, recipe, *storage)
            if recipe.base == "half" or quantizes and not recipe.upcast:
                # With `upcast` everything that is not quantized becomes fp32 further down.
                quantized.leave_in_fp32(model, recipe)
        replace_loss(model, recipe)
        if quantizes and not self._sharded:
            quantized.load(model, self.device)
        elif not self._sharded:
            model.to(self.device)  # type: ignore[arg-type]  # transformers wraps it without self
        if quantizes:
            if recipe.upcast:
                quantized.cast_the_rest(model)
            # Return the blocks that loading has left in the allocator's cache. peft's
            # `prepare_model_for_kbit_training` does so, and so does the Trainer when training
            # starts (`accelerator.free_memory()` in `Trainer._inner_training_loop`).
            torch.cuda.empty_cache()
        if recipe.freeze:
            freeze(model, recipe.freeze)
        full_model = add_lora(model, recipe) if recipe.lora_rank else model
        if recipe.checkpointing != "none":
            model.activation_checkpointing_enable(
                {"use_reentrant": recipe.checkpointing == "reentrant"},
                # On a CPU there is nothing to offload.
                offload=recipe.activation_offload and self.device.type != "cpu",
            )
        self.model: torch.nn.Module = sharding.share(full_model, recipe, self.device, half)
        # After sharding: the optimizer must see this rank's DTensors, not the whole weights.
        self.optimizer = make_optimizer(recipe, self.model)
        self.batches = make_batches(recipe, config, self.device, seed, rank)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=recipe.precision == "fp16-amp")

    def step(self) -> float:
        """Run one optimizer step over all micro-batches and return the mean loss."""
        losses = self.make_gradients()
        self.update()
        return sum(loss.item() for loss in losses)

    def make_gradients(self) -> list[torch.Tensor]:
        """Run the forward and backward pass of each micro-batch.

        Returns each micro-batch's share of the mean loss, detached. Several ranks reduce their
        gradients in the last micro-batch only.
        """
        losses = []
        for number, batch in enumerate(self.batches, 1):
            last = number == len(self.batches)
            with contextlib.nullcontext() if last else sharding.not_reduced(self.model):
                with self.autocast():
                    loss = self.model(**batch).loss / self.recipe.accumulation
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        return losses

    def update(self) -> None:
        """Clip, step and zero the gradients; do nothing if the backward pass has stepped."""
        if self.recipe.step_in_backward:
            return
        if self.recipe.max_grad_norm:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.recipe.set_to_none)

    def autocast(self) -> torch.autocast:
        dtype = None if self._sharded else AUTOCAST.get(self.recipe.precision)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """All tensors of the micro-batches."""
        return [tensor for batch in self.batches for tensor in batch.values()]

    @property
    def parameters(self) -> int:
        return sum(map(numel, self.model.parameters()))

    @property
    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def stored_as(recipe: Recipe) -> torch.dtype:
    """The dtype in which a recipe's model is loaded, before quantization and upcasts."""
    if recipe.base in QUANTIZED:
        assert recipe.compute_dtype is not None  # `Recipe` fills it in for a quantized base
        return quantized.COMPUTE_DTYPES[recipe.compute_dtype]
    # Autocast keeps weights in fp32 ("fp16-amp" is not in COMPUTE_DTYPES), unless base is "half".
    dtypes = AUTOCAST if recipe.base == "half" else quantized.COMPUTE_DTYPES
    return dtypes.get(recipe.precision, torch.float32)


def freeze(model: PreTrainedModel, parts: Sequence[int | str]) -> None:
    """Switch off the gradients of parts of a transformers model.

    parts: `embeddings` (all parameters before the first layer), whole numbers (that many first
        layers), `backbone` (everything except the head), or names of modules.

    Raises ValueError for a part that the model does not have, and if nothing is left to train.
    """
    base = model.base_model
    # The layers are the longest list; a model may have others, such as a list of experts.
    stacks = [module for module in base.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max(stacks, key=len)
    in_layers = {id(parameter) for parameter in layers.parameters()}
    for part in parts:
        if part == "backbone":
            frozen = base.parameters()
        elif part == "embeddings":
            # Parameters come in the order of their definition, embeddings first.
            before = lambda parameter: id(parameter) not in in_layers  # noqa: E731
            frozen = itertools.takewhile(before, base.parameters())
        elif isinstance(part, int):
            if part > len(layers):
                raise ValueError(f"freeze holds {part}: the model has {len(layers)} layers")
            frozen = layers[:part].parameters()
        else:
            # With and without the prefix of the base model: "bert.encoder" and "encoder".
            named = dict(model.named_modules()) | dict(base.named_modules())
            if part not in named:
                names = ", ".join(name for name, _ in base.named_children())
                raise ValueError(
                    f"freeze holds {part!r}: allowed are embeddings, backbone, a number of "
                    f"layers, and names of modules such as {names}"
                )
            frozen = named[part].parameters()
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze holds {', '.join(map(str, parts))}: nothing is left to train")


def add_lora(model: PreTrainedModel, recipe: Recipe) -> torch.nn.Module:
    """The model with peft's LoRA adapters; only these and a classification head are trained.

    Raises NoAdapters, a ValueError, for targets that peft refuses or that do not compute as linear
    layers. Raises ValueError for targets that the model does not have, and for a rank above the
    smaller side of every target.
    """
    peft = import_peft()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, (torch.nn.Linear, Conv1D))}
    names = {name.split(".")[-1] for name in linear}
    targets = recipe.lora_targets
    chosen = {
        name: module
        for name, module in linear.items()
        if targets == "all-linear" or name.split(".")[-1] in targets
    }
    odd = {name.split(".")[-1] for name, module in chosen.items() if not _is_as_linear(module)}
    if odd:
        raise NoAdapters(
            f"lora_targets is {targets!r}: {', '.join(sorted(odd))} of {recipe.model_name} does "
            "not compute as a linear layer, which peft's adapters need; allowed are "
            f"{', '.join(sorted(names - odd))}"
        )
    widths = [
        min(module.weight.shape if isinstance(module, Conv1D) else SIDES(module))
        for module in chosen.values()
    ]
    if widths and recipe.lora_rank > max(widths):
        raise ValueError(
            f"lora_rank is {recipe.lora_rank}: {recipe.model_name} allows whole numbers up to "
            f"{max(widths)}"
        )
    assert recipe.task is not None  # a recipe takes the usual one
    config = peft.LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=2 * recipe.lora_rank,
        lora_dropout=recipe.lora_dropout,
        target_modules=targets if targets == "all-linear" else list(targets),
        task_type=PEFT_TASKS.get(recipe.task),
        fan_in_fan_out=isinstance(next(iter(linear.values())), Conv1D),
    )
    with warnings.catch_warnings():  # peft asks transformers for checkpointing by its old name
        warnings.simplefilter("ignore", FutureWarning)
        # For fused experts peft fills in `rank_pattern` itself
        # (peft/utils/transformers_weight_conversion.py), then warns about keys without a match.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        try:
            adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=recipe.lora_fp32)
        except (ValueError, TypeError) as error:
            raise NoAdapters(
                f"lora_targets is {targets!r}: peft refuses it ({models.one_line(error)}); "
                f"{recipe.model_name} has {', '.join(sorted(names))}"
            ) from None
    # For mixtures of experts peft has moved old module names from `config.target_modules` to
    # `target_parameters`. So look at the config, not at the recipe's targets.
    asked = set() if targets == "all-linear" else set(config.target_modules)
    unknown = asked - {name.split(".")[-1] for name in adapted.base_model.targeted_module_names}
    if unknown:
        raise ValueError(
            f"lora_targets holds {', '.join(sorted(unknown))}: {recipe.model_name} has "
            f"{', '.join(sorted(names))}"
        )
    return adapted.train()


# Of a linear layer. Not its weight's shape, because packed 4-bit weights have another shape.
SIDES = operator.attrgetter("in_features", "out_features")


def _is_as_linear(module: torch.nn.Module) -> bool:
    """Whether a module's output has the shape of a linear layer's; a router's may not.

    A subclass is tried on meta tensors, outside all dispatch modes, so that no trace records it.
    """
    kind = getattr(module, "source_cls", type(module))  # the original class of a quantized layer
    if kind is Conv1D or kind.forward is torch.nn.Linear.forward:
        return True
    with _disable_current_modes(), torch.no_grad():
        shapes = {name: p.shape for name, p in module.named_parameters()}
        weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        before, after = SIDES(module)
        tokens = torch.empty(2, 3, before, device="meta")
        try:
            result = torch.func.functional_call(module, weights, (tokens,))
        except Exception:  # it expects another input
            return False
    return isinstance(result, torch.Tensor) and result.shape == (2, 3, after)


def import_libraries(recipe: Workload) -> None:
    """Import the packages that a recipe needs in addition to torch and transformers.

    Call it before a simulation starts, because some packages create tensors at import. Raises
    ValueError for a package that is not installed.
    """
    if is_of_bitsandbytes(recipe.optimizer) or recipe.base in QUANTIZED:
        import_needed("bitsandbytes", f"optimizer {recipe.optimizer}, base {recipe.base}")
    if recipe.lora_rank:
        import_peft()
    if recipe.optimizer_offload != "none":
        import_needed("torchao.optim", f"optimizer_offload {recipe.optimizer_offload}")
    if library_of(recipe.optimizer) == "transformers":
        # This import also imports peft where peft is installed.
        import_needed("transformers.optimization", recipe.optimizer)


def import_peft() -> ModuleType:
    """The package peft. Raises ValueError if it is not installed."""
    return import_needed("peft", "lora_rank")


# Recipe task -> peft's task type. With SEQ_CLS peft also trains the new classification head. peft
# has no task type for a masked language model.
PEFT_TASKS = {
    "sequence-classification": "SEQ_CLS",
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
}


MOST_TOKENS = 2**28  # 2 GiB as int64: the host creates the tokens of a run


def check_tokens(sequences: int, length: int) -> None:
    """Raise ValueError for more tokens than a host should create for one prediction."""
    if sequences * length > MOST_TOKENS:
        raise ValueError(
            f"{sequences:,} sequences of {length:,} tokens are {sequences * length:,} tokens: "
            f"allowed are {MOST_TOKENS:,} at a time"
        )


def make_batches(
    recipe: Recipe,
    config: PretrainedConfig,
    device: torch.device | str,
    seed: int = 0,
    rank: int = 0,
) -> list[Batch]:
    """Seeded random tokens and labels, one dictionary per micro-batch.

    Every rank draws the batch of all ranks and keeps its own part, so the ranks together see the
    batch that one process would see.

    Tensors, all int64: input_ids [batch_size, seq_len]; labels of the same shape, or [batch_size]
    for a classifier; attention_mask if padded; position_ids if packed. With flash_attention_2 a
    packed batch is a single row.
    """
    check_tokens(recipe.batch_size * recipe.ranks * recipe.accumulation, recipe.seq_len)
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, sequences: int, *shape: int) -> torch.Tensor:
        of_all = (recipe.ranks * sequences, *shape)
        drawn = torch.randint(0, high, of_all, generator=generator)
        # The clone frees the storage that holds the parts of the other ranks.
        return drawn.chunk(recipe.ranks)[rank].clone().to(device)

    batches = []
    for _ in range(recipe.accumulation):
        tokens = integers(config.vocab_size, recipe.batch_size, recipe.seq_len)
        if recipe.task == "sequence-classification":
            assert config.num_labels is not None  # every classifier's config has it
            labels = integers(config.num_labels, recipe.batch_size)
        else:
            labels = tokens
        batch = {"input_ids": tokens, "labels": labels}
        if recipe.packed:
            first = recipe.seq_len // 2  # tokens of the first of the two texts in each row
            # Positions restart at 0 where the second text begins; transformers derives the
            # block-diagonal mask from that.
            positions = torch.cat([torch.arange(first), torch.arange(recipe.seq_len - first)])
            batch["position_ids"] = positions.repeat(recipe.batch_size, 1).to(device)
            if recipe.attention == "flash_attention_2":
                # flash-attn's varlen kernels take the texts of a batch as one row with borders.
                batch = {name: rows.reshape(1, -1) for name, rows in batch.items()}
        batches.append(_padded(batch, config) if recipe.padded else batch)
    return batches


def _padded(batch: Batch, config: PretrainedConfig) -> Batch:
    """The batch with its last token replaced by padding in every sequence, and the mask for it."""
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -1] = 0
    padding = config.pad_token_id or 0
    tokens = batch["input_ids"].masked_fill(mask == 0, padding)
    labels = batch["labels"]
    if labels.dim() == 2:  # one label per token, not per sequence
        labels = labels.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
