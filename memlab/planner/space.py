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

FOR_ADAPTERS = ("adamw_torch_fused", "adamw_8bit")  # other optimizers save next to nothing there
SHARDINGS = ("ddp", "zero2", "zero3")
CLIPPING = 1.0  # the Trainer's default of max_grad_norm
# The frozen base of LoRA under autocast is in 16 bits, as from_pretrained loads most models.
HALF = {"base": "half"}
# The frozen base of QLoRA. The part that is not quantized stays in 16 bits, as in TRL's SFTTrainer.
NF4 = {"base": "nf4", "double_quant": True, "upcast": False}


@dataclass(frozen=True)
class Combination:
    """One point of the search space: all that a plan chooses, except for sizes."""

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
    """(the combinations to search, the plainest of each way first; what is left out and why).

    refused: why the model gets no adapters, empty if it does.

    Raises ValueError if no combination is left, and for a precision that the GPU only emulates.
    """
    native = "bfloat16" in card.native_dtypes
    for precision in question.precisions or ():
        require_native(precision, card.name, native)
    half = "bf16" if native else "fp16"
    amp, keeps_quality = f"{half}-amp", question.keep_quality
    # The precisions to try unless the question names some. Pure fp16 is never among them.
    usual = {
        "full": (amp, "fp32") if keeps_quality or not native else (amp, "fp32", half),
        # Adapters in fp32 on a base in 16 bits, under autocast, as the Trainer runs them.
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
        what = "models with two stacks of layers" if two_stacks else "QLoRA"
        excluded.append(
            f"{what} under zero2 and zero3 (simulate it), zero1 (it splits only the states)"
        )
    for way in question.ways:
        if way != "full" and refused:
            continue
        of_way = optimizers if way == "full" else FOR_ADAPTERS
        every = itertools.product(
            question.precisions or usual[way], of_way, (False, True), shardings
        )
        for precision, optimizer, checkpointing, sharding in every:
            # Under zero2 and zero3 an optimizer gets parts of weights, which not every one takes.
            if sharding == "ddp" or way != "qlora" and OPTIMIZERS[optimizer].sharded:
                candidates.append(Combination(way, precision, optimizer, checkpointing, sharding))
    if not candidates:
        raise ValueError(f"ways is {question.ways!r}: {'; '.join(excluded)}")
    return candidates, tuple(excluded)


class Recipes:
    """The recipes of one question on one GPU.

    combinations, excluded: as `combinations` returns them.
    attention: `sdpa` if the architecture has it, else `eager`.
    batches: the micro-batch sizes that divide a rank's sequences of a step, in rising order.
    weights: the number of weights of the model. quantized: those of them that QLoRA quantizes.
    """

    def __init__(self, question: Question, card: GPU):
        self.question, self.card = question, card
        # A catalogue name stays a name, whose facts are kept on disk. Any other model is read once.
        named = isinstance(question.model, str) and question.model in models.MODELS
        self.model = question.model if named else models.config(question.model)
        self.attention = "eager"
        # A recipe checks itself. Making one per way refuses bad input at once, in the user's words.
        for way in question.ways:
            first = Combination(way, "fp32", "adamw_torch_fused")
            self.recipe(first, 1, ranks=1, model=question.model)
        self.attention = attention_of(self.model, question.task)
        self.combinations, self.excluded = self.of_ways(question.ways)
        effective = question.effective_batch // question.ranks  # sequences per rank and step
        self.batches = [n for n in range(1, effective + 1) if effective % n == 0]
        self.quantized, self.weights = numbers_of(self.model, question.task)

    def of_ways(
        self, ways: tuple[str, ...], ranks: int | None = None
    ) -> tuple[list[Combination], tuple[str, ...]]:
        """As `combinations`, for these ways to train and, if given, this number of GPUs."""
        asked = dataclasses.replace(self.question, ways=ways, ranks=ranks or self.question.ranks)
        refused = ways != ("full",) and refusal(self.model, asked.task, asked.lora_rank)
        return combinations(asked, self.card, refused or "")

    def recipe(self, combination: Combination, batch: int, **changes: Any) -> Recipe:
        """The recipe of a combination with a micro-batch of `batch` sequences.

        changes: fields of the recipe that replace those of the question.
        """
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
        """Lower bound of the bytes that a rank holds at the end of a backward pass.

        Counted are weights, gradients and optimizer states, without adapters. A state of 32 bits
        has the dtype of its weight; paged states may all be on the host.
        """
        ranks = ranks or self.question.ranks
        is_full = combination.way == "full"
        size = bytes_per_weight(combination.precision)
        # Experts and embeddings of a quantized base stay in 16 bits.
        in_4_bits = self.quantized if combination.way == "qlora" else 0
        held = (self.weights - in_4_bits) * (size if is_full else 2) + in_4_bits / 2
        optimizer = OPTIMIZERS[combination.optimizer]
        state = 0 if optimizer.paged else size if optimizer.bits == 32 else optimizer.bits / 8
        # Gradient and states of each weight.
        trained: float = is_full * self.weights * (size + optimizer.states * state)
        # zero2 keeps weights gathered from the forward to the backward pass, zero3 does not.
        held /= ranks if combination.sharding == "zero3" else 1
        trained /= ranks if combination.sharding != "ddp" else 1
        return int(held + trained)

    def most_sparing(self, candidates: list[Combination], ranks: int | None = None) -> Combination:
        """The combination that probably holds the fewest bytes at once, the plainest of equals.

        Those with checkpointing come first, then those with the smallest `least_bytes`, to which
        autocast adds copies of the weights in half precision. Paged and factored states count as
        nothing, because next to none of them are on the GPU.
        """

        def held(combination: Combination) -> tuple[bool, float]:
            copies = combination.way == "full" and combination.precision in AUTOCAST
            nbytes = self.least_bytes(combination, ranks) + copies * 2 * self.weights
            return not combination.checkpointing, nbytes

        return min(candidates, key=held)

    def in_parts(self, combination: Combination) -> Combination | None:
        """The combination with TRL's default loss, in parts; None if it cannot have that loss.

        It needs a causal language model whose logits are a plain product, and one rank.
        """
        recipe = self.recipe(combination, 1)
        supported = recipe.task == "causal-lm" and recipe.ranks == 1
        if not supported or unlike_product(self.model):
            return None
        return dataclasses.replace(combination, loss="chunked")

    @property
    def bytes_of_logits(self) -> int:
        """Upper bound of the bytes that the loss in parts saves for one sequence.

        Per logit: 2 bytes in half precision, 4 in fp32, 4 for the log-probability, and 4 + 2 for
        two gradients.
        """
        vocabulary = getattr(models.settings(self.model), "vocab_size", 0)
        return 16 * self.question.seq_len * vocabulary


def bytes_per_weight(precision: str) -> int:
    """Bytes per trained weight in a precision of `Recipe`."""
    return 2 if precision in ("bf16", "fp16") else 4


def computes(card: GPU, question: Question) -> bool:
    """Whether a GPU has native support for the precisions that a question names."""
    asked = any("bf16" in precision for precision in question.precisions or ())
    return "bfloat16" in card.native_dtypes or not asked


@remembered
def attention_of(model: models.Model, task: str | None) -> str:
    """`sdpa` if the architecture supports it, else `eager`."""
    try:  # two layers on the meta device are enough to be refused
        models.skeleton(models.with_layers(model, 2), task, "sdpa")
    except ValueError:
        return "eager"
    return "sdpa"


@remembered
def refusal(model: models.Model, task: str | None, lora_rank: int) -> str:
    """Why peft gives a model no adapters; empty if it does.

    Tried on two layers of the model on the meta device. Raises ValueError for a rank that is larger
    than every layer.
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
