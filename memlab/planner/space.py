"""What a plan may choose from: ways to train, number formats, optimizers, shardings, sizes."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from memlab import models
from memlab.gpus import GPU, require_native
from memlab.libraries import remembered
from memlab.planner.result import Question, tier_of
from memlab.predict.recipe_log import numbers_of
from memlab.spec.logits import unlike_product
from memlab.spec.optimizers import OPTIMIZERS
from memlab.spec.recipe import AUTOCAST, Recipe

FOR_ADAPTERS = ("adamw_torch_fused", "adamw_8bit")  # whose states are small in any case
SHARDINGS = ("ddp", "zero2", "zero3")
CLIPPING = 1.0  # the Trainer's own
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
    loss: str = "whole"

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
    amp, keeps_quality = f"{half}-amp", question.keep_quality
    usual = {
        "full": (amp, "fp32") if keeps_quality or not native else (amp, "fp32", half),
        # Adapters in fp32 on a base in 16 bits, under autocast: as the Trainer runs it.
        "lora": (amp,),
        "qlora": (amp,),
    }
    excluded, worse = [], [name for name, optimizer in OPTIMIZERS.items() if optimizer.worse]
    if keeps_quality:
        rather = "trained weights in pure bf16, " if native else ""
        excluded.append(f"{rather}{' and '.join(worse)} (they may train worse)")
    optimizers = [name for name, optimizer in OPTIMIZERS.items() if optimizer.planned]
    optimizers += [] if keeps_quality else worse
    if refused:
        excluded.append(f"LoRA and QLoRA ({refused})")
    candidates = []
    shardings: tuple[str, ...] = ("ddp",)
    if question.ranks > 1:
        two_stacks = (question.task or models.default_task(question.model)) == "seq2seq-lm"
        shardings = ("ddp",) if two_stacks else SHARDINGS
        what = "two stacks of layers" if two_stacks else "QLoRA"
        excluded.append(
            f"{what} under zero2 and zero3 (simulate it), zero1 (the states alone are split)"
        )
    for way in question.ways:
        if way != "full" and refused:
            continue
        of_way = optimizers if way == "full" else FOR_ADAPTERS
        every = itertools.product(
            question.precisions or usual[way], of_way, (False, True), shardings
        )
        for precision, optimizer, checkpointing, sharding in every:
            if sharding == "ddp" or way != "qlora" and OPTIMIZERS[optimizer].sharded:
                candidates.append(Combination(way, precision, optimizer, checkpointing, sharding))
    if not candidates:
        raise ValueError(f"ways is {question.ways!r}: {'; '.join(excluded)}")
    return candidates, tuple(excluded)


class Recipes:
    """The recipes of one question on a card.

    combinations: what is searched, the plainest first; excluded: what is not, and why. batches:
    the micro-batches that divide the sequences of a step. weights: numbers in the model.
    """

    def __init__(self, question: Question, card: GPU):
        self.question, self.card = question, card
        named = isinstance(question.model, str) and question.model in models.MODELS
        self.model = question.model if named else models.config(question.model)
        self.attention = "eager"
        for way in question.ways:
            first = Combination(way, "fp32", "adamw_torch_fused")
            self.recipe(first, 1, ranks=1, model=question.model)  # or an error
        self.attention = attention_of(self.model, question.task)
        self.combinations, self.excluded = self.of_ways(question.ways)
        effective = question.effective_batch // question.ranks  # of each rank
        self.batches = [n for n in range(1, effective + 1) if effective % n == 0]
        _, self.weights = numbers_of(self.model, question.task)

    def of_ways(
        self, ways: tuple[str, ...], ranks: int | None = None
    ) -> tuple[list[Combination], tuple[str, ...]]:
        """As `combinations`, of these ways to train, on so many cards."""
        asked = dataclasses.replace(self.question, ways=ways, ranks=ranks or self.question.ranks)
        refused = ways != ("full",) and refusal(self.model, asked.task, asked.lora_rank)
        return combinations(asked, self.card, refused or "")

    def recipe(self, combination: Combination, batch: int, **changes: Any) -> Recipe:
        """A combination with a micro-batch."""
        asked = self.question
        ranks = changes.get("ranks", asked.ranks)
        values = {
            "model": self.model,
            "task": asked.task,
            "batch_size": batch,
            "accumulation": max(1, asked.effective_batch // ranks // batch),
            "seq_len": asked.seq_len,
            "precision": combination.precision,
            "optimizer": combination.optimizer,
            "checkpointing": combination.checkpointing,
            "attention": self.attention,
            "loss": combination.loss,
            "max_grad_norm": CLIPPING,
            "ranks": ranks,
            "sharding": combination.sharding,
            "expandable_segments": asked.expandable_segments,
        }
        if combination.way != "full":
            values["lora_rank"] = asked.lora_rank
            values |= HALF if combination.precision in AUTOCAST else {}
        if combination.way == "qlora":
            values |= NF4
        return Recipe(**values | changes)

    def least_bytes(self, combination: Combination, ranks: int | None = None) -> int:
        """What a rank holds when a backward pass ends, at least: weights, gradients, states."""
        ranks = ranks or self.question.ranks
        is_full = combination.way == "full"
        size = bytes_per_weight(combination.precision)
        held: float = {"full": size, "lora": 2, "qlora": 0.5}[combination.way]
        optimizer = OPTIMIZERS[combination.optimizer]
        state = 0 if optimizer.paged else size if optimizer.bits == 32 else optimizer.bits / 8
        trained: float = is_full * (size + optimizer.states * state)
        held /= ranks if combination.sharding == "zero3" else 1
        trained /= ranks if combination.sharding != "ddp" else 1
        return int(self.weights * (held + trained))

    def most_sparing(self, candidates: list[Combination], ranks: int | None = None) -> Combination:
        """The one that is likely to hold least at once, the plainest of equals.

        Autocast keeps copies of the weights in half precision. Where states are paged or factored
        next to none of them are on the card.
        """

        def held(combination: Combination) -> tuple[bool, float]:
            copies = combination.way == "full" and combination.precision in AUTOCAST
            nbytes = self.least_bytes(combination, ranks) + copies * 2 * self.weights
            return not combination.checkpointing, nbytes

        return min(candidates, key=held)

    def in_parts(self, combination: Combination) -> Combination | None:
        """The same with the loss in parts, TRL's default; None where the model has no such loss."""
        recipe = self.recipe(combination, 1)
        supported = recipe.task == "causal-lm" and recipe.ranks == 1
        if not supported or unlike_product(self.model):
            return None
        return dataclasses.replace(combination, loss="chunked")

    @property
    def bytes_of_logits(self) -> int:
        """The most that the loss in parts saves of one sequence: logits in 2 bytes and in 4, their
        logarithms and two gradients."""
        vocabulary = getattr(models.settings(self.model), "vocab_size", 0)
        return 16 * self.question.seq_len * vocabulary


def bytes_per_weight(precision: str) -> int:
    """Of weights that train, in a precision."""
    return 2 if precision in ("bf16", "fp16") else 4


def computes(card: GPU, question: Question) -> bool:
    """Whether a card has the number formats that were asked for by name."""
    asked = any("bf16" in precision for precision in question.precisions or ())
    return "bfloat16" in card.native_dtypes or not asked


@remembered
def attention_of(model: models.Model, task: str | None) -> str:
    """`sdpa` where the architecture has it, else `eager`."""
    try:
        models.skeleton(models.with_layers(model, 2), task, "sdpa")
    except ValueError:
        return "eager"
    return "sdpa"


@remembered
def refusal(model: models.Model, task: str | None, lora_rank: int) -> str:
    """Why a model gets no adapters; empty where it does.

    Raises ValueError for a rank above what the layers have.
    """
    import torch

    from memlab.workloads.training import NoAdapters, add_lora

    recipe = Recipe(model, task, lora_rank=lora_rank, seq_len=1)
    with torch.device("meta"):
        built = models.build(models.with_layers(model, 2), recipe.task)
        try:
            add_lora(built, recipe)
        except NoAdapters as error:
            return str(error)
    return ""
