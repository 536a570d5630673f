"""What a plan may choose from: ways to train, number formats, optimizers, shardings."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass

import torch

from memlab import models
from memlab.gpus import GPU, require_native
from memlab.planner.result import WORSE_OPTIMIZERS, Question, tier_of
from memlab.spec.recipe import SHARDED_OPTIMIZERS, Recipe
from memlab.workloads.training import NoAdapters, add_lora

OPTIMIZERS = ("adamw_torch_fused", "adamw_8bit", "adafactor", "paged_adamw_8bit")
FOR_ADAPTERS = ("adamw_torch_fused", "adamw_8bit")  # whose states are small in any case
SHARDINGS = ("ddp", "zero2", "zero3")
# The base of LoRA where there is autocast, as from_pretrained loads most models by themselves.
HALF = {"base": "half"}
# The base of QLoRA. What is not quantized stays in 16 bits, as TRL's SFTTrainer leaves it.
NF4 = {"base": "nf4", "double_quant": True, "upcast": False}


@dataclass(frozen=True)
class Combination:
    """What is searched over, apart from sizes."""

    way: str
    precision: str
    optimizer: str
    checkpointing: bool = False
    sharding: str = "ddp"

    @property
    def tier(self) -> int:
        """One of `memlab.planner.result.TIERS`."""
        return tier_of(self.way, self.precision, self.optimizer)


def combinations(
    question: Question, card: GPU, refused: str = ""
) -> tuple[list[Combination], tuple[str, ...]]:
    """(what is searched, the plainest of each way first; what is not, and why).

    refused: why there can be no adapters. Raises ValueError where nothing is left.
    """
    native = "bfloat16" in card.native_dtypes
    for precision in question.precisions or ():
        require_native(precision, card.name, native)
    half = "bf16" if native else "fp16"
    amp, kept = f"{half}-amp", question.keep_quality
    usual = {
        "full": (amp, "fp32") if kept or not native else (amp, "fp32", half),
        # Adapters in fp32 on a base in 16 bits, under autocast: as the Trainer runs it.
        "lora": (amp,),
        "qlora": (amp,),
    }
    excluded = []
    if kept:
        rather = "trained weights in pure bf16, " if native else ""
        excluded.append(f"{rather}{' and '.join(WORSE_OPTIMIZERS)} (they may train worse)")
    optimizers = OPTIMIZERS if kept else OPTIMIZERS + WORSE_OPTIMIZERS
    bitsandbytes = is_here("bitsandbytes")
    if not bitsandbytes:
        excluded.append("QLoRA and 8-bit optimizers (the package bitsandbytes is not here)")
    if refused:
        excluded.append(f"LoRA and QLoRA ({refused})")
    found = []
    shardings = ("ddp",)
    if question.ranks > 1:
        two_stacks = (question.task or models.default_task(question.model)) == "seq2seq-lm"
        shardings = ("ddp",) if two_stacks else SHARDINGS
        what = "two stacks of layers" if two_stacks else "QLoRA"
        excluded.append(
            f"{what} under zero2 and zero3 (the formula does not know it: simulate it), "
            "zero1 (the states alone are split)"
        )
    for way in question.ways:
        if way == "qlora" and not bitsandbytes:
            continue
        if way != "full" and refused:
            continue
        of_way = optimizers if way == "full" else FOR_ADAPTERS
        every = itertools.product(
            question.precisions or usual[way], of_way, (False, True), shardings
        )
        for precision, optimizer, checkpointing, sharding in every:
            known = bitsandbytes or not optimizer.endswith("8bit")
            known &= way != "qlora" or sharding == "ddp"
            if known and (sharding == "ddp" or optimizer in SHARDED_OPTIMIZERS):
                found.append(Combination(way, precision, optimizer, checkpointing, sharding))
    if not found:
        raise ValueError(f"ways is {question.ways!r}: {'; '.join(excluded)}")
    return found, tuple(excluded)


def is_here(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def computes(card: GPU, question: Question) -> bool:
    """Whether a card has the number formats that were asked for by name."""
    asked = any("bf16" in precision for precision in question.precisions or ())
    return "bfloat16" in card.native_dtypes or not asked


def attention_of(model, task) -> str:
    """`sdpa` where the architecture has it, else `eager`."""
    with torch.device("meta"):
        try:
            models.build(models.with_layers(model, 2), task, attention="sdpa")
        except ValueError:
            return "eager"
    return "sdpa"


def refusal(model, question: Question) -> str:
    """Why a model gets no adapters; empty where it does.

    Raises ValueError for a rank above what the layers have.
    """
    recipe = Recipe(model, question.task, lora_rank=question.lora_rank, seq_len=1)
    with torch.device("meta"):
        built = models.build(models.with_layers(model, 2), recipe.task)
        try:
            add_lora(built, recipe)
        except NoAdapters as error:
            return str(error)
    return ""
