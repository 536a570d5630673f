"""What decides which allocations a recipe makes, apart from the sizes that only scale them.

A model's structure is its config without sizes, so a trace of one structure serves many recipes.
There are two kinds of structures. In a shared structure all dimensions are sizes, so that models of
a family share it, if their configs have the usual dimensions. In an exact structure the widths are
fixed. Its sizes are the micro-batch, the length, the LoRA rank, the number of positions and the
attention window.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from memlab import models
from memlab.gpus import GPU, card_class
from memlab.libraries import remembered
from memlab.models import Model
from memlab.predict.recipe_log import unlike_micro_batches
from memlab.predict.widths import (
    EMBEDDING_SIZES,
    LENGTHS,
    LIKE_RANK,
    LIKE_WIDTHS,
    ONE_PROJECTION,
    WIDTHS,
    at_widths,
    heads_of_a_key,
    shapes_of,
    size_field_names,
)
from memlab.spec.optimizers import OPTIMIZERS, is_of_bitsandbytes
from memlab.spec.recipe import (
    COMPUTED_IN,
    FOUR_BITS,
    Recipe,
    is_moved_by_sharding,
)
from memlab.trace.symbols import ALIGNED, chosen_sizes

# Fields of a config that say nothing about its tensors.
NO_STRUCTURE = {"architectures", "transformers_version"}
# Kinds of scaled rotary positions with the same tensors as unscaled ones.
SAME_ROPE = ("default", "linear", "llama3", "yarn")
# The largest LoRA rank to record at. A matrix with a side below `NARROW` is taken for a router,
# which gets no adapter, so it does not limit the rank.
LARGEST_RANK, NARROW = 512, 32
# Families whose learned positions begin after two unused rows: `OPTLearnedPositionalEmbedding`.
POSITIONS_FROM_TWO = ("bart", "mbart", "opt")
LAYERS = 4  # layers, at least, of the model that is recorded for a shared structure
# Elements. bitsandbytes keeps the states of smaller tensors in 32 bits, and does not page them:
# `min_8bit_size` and `get_state_buffer` of bitsandbytes/optim/optimizer.py.
LEAST_8BIT, LEAST_PAGED = 4096, 100_000


class TraceDomain(NamedTuple):
    """The properties of a recipe's sizes that decide which events happen, not only their bytes.

    A trace holds for all sizes with the same properties.

    one_sequence: whether the micro-batch is one sequence. Transposing its dimension then needs no
        copy to become contiguous.
    alignment: the greatest common divisor of the length and 16, because kernels pad masks.
    inside: whether the length is below the attention window, so that no mask is made.
    batches: the number of micro-batches with different events (`unlike_micro_batches`), or fewer
        if the step has fewer.
    """

    one_sequence: bool
    alignment: int
    inside: bool
    batches: int

    @classmethod
    def of(cls, recipe: Recipe) -> TraceDomain:
        """The domain of a recipe's sizes."""
        window = getattr(models.settings(recipe.model), "sliding_window", None)
        return cls(
            recipe.batch_size == 1,
            math.gcd(recipe.seq_len, ALIGNED),
            window is None or recipe.seq_len < window,
            min(recipe.accumulation, unlike_micro_batches(recipe)),
        )


@dataclass(frozen=True)
class Structure:
    """A model without its sizes.

    key: everything that distinguishes this structure, as JSON.
    model: the model that it was derived from.
    widths: symbol -> (chosen width, the model's own); empty for an exact structure.
    rank: whether the LoRA rank is a size.
    attention: the attention kernels of the forward and backward pass; empty if they follow from
        the key.
    """

    key: str
    model: models.Model
    widths: dict[str, tuple[int, int]]
    rank: bool = True
    attention: str = ""

    @property
    def config(self) -> Any:
        """The model's config at the chosen widths, or at its own."""
        config = models.config(self.model)
        return _at_chosen_widths(config)[0] if self.widths else config

    def sizes(self, recipe: Recipe) -> dict[str, int]:
        """Symbol -> its value in a recipe, without symbols that the recipe's model does not have.

        b: micro-batch. s: sequence length. r: LoRA rank. P: positions. w: attention window. The
        widths are those of `memlab.predict.widths.WIDTHS`. The sums are those of `_sums`.
        """
        config = models.settings(recipe.model)
        sizes = {
            "b": recipe.batch_size,
            "s": recipe.seq_len,
            "r": self.rank and recipe.lora_rank,
            "P": getattr(config, "max_position_embeddings", None) or 0,
            "w": getattr(config, "sliding_window", None) or 0,
        }
        sizes |= {name: sizes[of] + addend for name, (of, addend) in _sums(config).items()}
        sizes |= {name: own for name, (_, own) in self.widths.items()}
        return {name: value for name, value in sizes.items() if value}

    def chosen(self, recipe: Recipe, around: TraceDomain) -> tuple[Recipe, dict[str, int]]:
        """(the recipe at sizes to record at, symbol -> the chosen size).

        The model of the returned recipe has the chosen positions and the chosen window. Raises
        ValueError if no sizes can be told apart from the model's own numbers.
        """
        model = models.with_layers(self.config, 2)
        shapes = shapes_of(self.config, recipe.task)
        # Every number of the model that may be a factor of some tensor's bytes. The chosen sizes
        # must have prime factors that none of these has. The number of layers is no such factor, so
        # it is 2 here.
        own = {size for shape in shapes for size in shape}
        own |= {value for value in vars(model).values() if type(value) is int}
        if is_moved_by_sharding(recipe):
            own |= _sharded_sizes(replace(recipe, model=model))
        # `add_lora` refuses a rank above a layer's size, so stay within the smallest matrix.
        narrow = [min(shape) for shape in shapes if len(shape) == 2 and min(shape) >= NARROW]
        widths = {name: chosen for name, (chosen, _) in self.widths.items()}
        sizes = chosen_sizes(
            own,
            one_sequence=around.one_sequence,
            alignment=around.alignment,
            inside=around.inside,
            rank=min([LARGEST_RANK, *narrow]) if self.rank and recipe.lora_rank else None,
            widths=widths.values(),
            sums=_sums(self.config),
        )
        # Only fields that the config has, and has not switched off.
        values = {
            name: sizes[symbol]
            for name, symbol in (("max_position_embeddings", "P"), ("sliding_window", "w"))
            if getattr(self.config, name, None)
        }
        changes: dict[str, Any] = {
            "batch_size": sizes["b"],
            "seq_len": sizes["s"],
            "accumulation": around.batches,
        }
        if "r" in sizes:
            changes["lora_rank"] = sizes["r"]
        model = models.resized(self.config, **values)
        if self.widths:  # a shallow model of the family must have layers that repeat, too
            model = models.with_layers(model, max(model.num_hidden_layers, LAYERS))
        return replace(recipe, model=model, **changes), sizes | widths


def _sums(config: Any) -> dict[str, tuple[str, int]]:
    """Symbol -> (symbol, addend): the sizes of a model that are another size plus a constant."""
    sums = {}
    taps = getattr(config, models.OF_SHORT_CONVOLUTIONS, None)
    if taps:
        sums["c"] = "s", taps - 1  # the padding of a causal convolution: `Lfm2ShortConv`
    if config.model_type in POSITIONS_FROM_TWO:
        sums["p"] = "P", 2
    return sums


def _sharded_sizes(recipe: Recipe) -> set[int]:
    """As `memlab.workloads.sharding.sharded_sizes`, for a recipe's model on the meta device."""
    import torch

    from memlab.workloads.sharding import sharded_sizes
    from memlab.workloads.training import add_lora

    with torch.device("meta"):
        built = models.build(recipe.model, recipe.task)
        model = add_lora(built, recipe) if recipe.lora_rank else built
    return sharded_sizes(model, recipe.ranks // recipe.replicas)


def structures(
    recipe: Recipe, card: GPU, ignore_small_tensors: bool = False
) -> Iterator[tuple[Structure, Structure]]:
    """Candidate structures for a recipe's two halves, the most widely shared first.

    Yields (structure of the forward and backward pass, structure of the update).

    ignore_small_tensors: accept a shared structure that is exact but for small tensors. Small
        weights may then have 8-bit states that they do not have in the recording, or the reverse.
        The head size need only be a multiple of 8, at which no kernel pads it, instead of 32.
    """
    structure, own = shared_structure(recipe.model), exact_structure(recipe, card)
    updates = exact_structure(recipe, card, of_updates=True)
    # Ranks gather or reduce several weights in one buffer. Its bytes are a sum, not a product of
    # widths.
    if structure is not None and recipe.ranks == 1:
        # The backward pass of flash attention rounds the head size of a buffer up to a multiple of
        # 32 (`memlab.card.kernels.scratch`), so only these give products.
        attention = _attention(recipe, structure, card, 8 if ignore_small_tensors else 32)
        if attention:
            structure = replace(structure, attention=attention)
            alike = ignore_small_tensors or _states_are_alike(recipe, structure)
            yield structure, structure if alike else updates
    yield own, updates


def has_no_trace(recipe: Recipe, card: GPU) -> bool:
    """Whether a recipe is known in advance to have no trace that holds for all sizes.

    To find that out by recording would take minutes.
    """
    # A loss that is computed in chunks of tokens has more events the more tokens there are. A step
    # inside the backward pass leaves no update that could be recorded on its own.
    parts = recipe.loss != "whole" or recipe.step_in_backward
    # Copies to the host have bytes that are no products of sizes.
    away = recipe.activation_offload or recipe.optimizer_offload != "none"
    # flash-attn takes the borders between sequences, a tensor of one element more than sequences.
    borders = recipe.attention == "flash_attention_2" and (recipe.packed or recipe.padded)
    # The gated delta rule of Qwen3.5 and similar models loops over the chunks of a sequence.
    loops = hasattr(models.settings(recipe.model), models.OF_DELTA_RULE)
    return parts or away or borders or loops or has_fused_products(recipe, card)


def has_fused_products(recipe: Recipe, card: GPU) -> bool:
    """Whether bitsandbytes multiplies some 4-bit weight of a recipe without dequantizing it first.

    It does so for few tokens, by a table of GPUs, weight shapes and numbers of tokens
    (`_gemm_4bit_use_custom_cuda` in bitsandbytes/backends/cuda/ops.py). The events then depend on
    the number of tokens.
    """
    if recipe.base not in FOUR_BITS or recipe.compute_dtype is None:
        return False
    card_kind = [card.processors, *card.capability]
    fused = _fused_tokens(recipe.model, recipe.task, recipe.compute_dtype, card_kind)
    return recipe.batch_size * recipe.seq_len in fused


@remembered
def _fused_tokens(model: Model, task: str, dtype: str, card: list[int]) -> list[int]:
    """The numbers of tokens at which some product of a model is fused with the dequantization.

    card: [multiprocessors, major and minor compute capability] of a GPU.
    """
    from memlab.card.kernels.bitsandbytes import cuda_module, fuses_4bit_product
    from memlab.workloads.quantized import COMPUTE_DTYPES

    matrices = {tuple(shape) for shape in shapes_of(model, task) if len(shape) == 2}
    return [
        tokens
        for tokens in range(1, cuda_module()._gemm_4bit_custom_max_m + 1)
        if any(fuses_4bit_product(card, COMPUTE_DTYPES[dtype], tokens, *m) for m in matrices)
    ]


# ---------------------------------------------------------------------- shared structures


def shared_structure(model: Model) -> Structure | None:
    """The shared structure of a model; None if its dimensions are not the usual ones."""
    values = usual_values(model)
    return None if values is None else Structure(values["key"], model, values["widths"])


@remembered
def usual_values(model: Model) -> dict[str, Any] | None:
    """Key and widths of a model's shared structure; None if its dimensions are not the usual ones.

    The key leaves out what has no influence on the events: token ids, the number of layers and the
    release that wrote the config.json. It also leaves out settings that are unknown to the config's
    class.
    """
    config = models.config(model)
    layers = getattr(config, "num_hidden_layers", 0)
    if _has_other_widths(config) or not layers:
        return None
    if (getattr(config, "num_decoder_layers", None) or layers) != layers:
        return None
    chosen, own = _at_chosen_widths(config)
    fields = vars(type(config)()).keys() - NO_STRUCTURE
    values: dict[str, Any] = {"model_type": config.model_type}
    for name, value in vars(chosen).items():
        # A list with one entry per layer, all alike: the number of layers must not matter.
        if isinstance(value, (list, tuple)) and value and len(set(map(str, value))) == 1:
            value = value[0]
        # A dropout of 0 makes no mask, and all other probabilities make the same events. Other
        # floats, such as an epsilon, only change values.
        if isinstance(value, float):
            value = bool(value) if "drop" in name else None
        if isinstance(value, dict):
            value = _rope(value)
        hidden = name not in fields or name.startswith("_") or name.endswith("token_id")
        hidden |= type(value) is int and ("layers" in name or name == "n_layer")
        if not hidden and isinstance(value, (bool, int, str, list, tuple)):
            values[name] = value
    # Positions and window are sizes; only whether the config has them belongs to the key.
    for name in size_field_names(config):
        if values.get(name):
            values[name] = True
    return {"key": json.dumps(values, sort_keys=True), "widths": own}


@remembered
def _routes(
    model: Model, dtype: str, capability: list[int], changes: list[str], size: int = 64
) -> list[str]:
    """[SDPA's kernel without a mask, and with one] for a model at the chosen widths.

    dtype: a value of `COMPUTED_IN`. changes: the result of `changes_of_sdpa`. It is unused here but
    part of the key by which the answer is remembered. size: size of a head.
    """
    from memlab.card.kernels.sdpa import model_routes
    from memlab.workloads.quantized import COMPUTE_DTYPES

    shares = heads_of_a_key(_at_chosen_widths(models.config(model))[0]) > 1
    return list(model_routes(COMPUTE_DTYPES[dtype], shares, (capability[0], capability[1]), size))


def changes_of_sdpa() -> list[str]:
    """How this process differs from PyTorch's defaults in the kernels that SDPA may choose.

    Such are kernels that `torch.nn.attention.sdpa_kernel` has switched off. Empty if none differ.
    """
    if "torch" not in sys.modules:  # not imported, so not changed either
        return []
    import torch

    from memlab.card.kernels import sdpa

    changes = [f"{name} is off" for name, is_on in sdpa.SDPA_ROUTES.items() if not is_on()]
    if sdpa.SHARES_KEYS != sdpa.kernels_that_share_keys(torch.__version__):
        changes += [f"{name} shares keys" for name in sorted(sdpa.SHARES_KEYS)]
    return changes


def _rope(parameters: dict) -> str | None:
    """The part of a config's rotary parameters that decides which tensors are made."""
    kind = parameters.get("rope_type")
    kind = "default" if kind in SAME_ROPE else kind
    share = parameters.get("partial_rotary_factor", 1.0)
    return kind if share == 1 else f"{kind}, of {share} of a head"


def _has_other_widths(config: Any) -> bool:
    """Whether a config has dimensions that the symbols of `WIDTHS` do not describe."""
    get = functools.partial(getattr, config)
    return bool(
        config.is_heterogeneous
        or get("num_attention_heads", None) is None
        or get("num_kv_shared_layers", None)  # some layers reuse the keys of earlier ones
        # A dimension of size 1 can be transposed without a copy, so other events happen.
        or get("num_key_value_heads", None) == 1
        # The projection to queries, keys and values has g * (m + 2) * d rows. The prime factor of d
        # is 5, so a multiple of 5 as m + 2 would be read as another factor d.
        or (config.model_type in ONE_PROJECTION and (heads_of_a_key(config) + 2) % 5 == 0)
        or get("kv_lora_rank", None)  # latent attention has ranks, and heads of two sizes
        or get(models.OF_SHORT_CONVOLUTIONS, None)  # no pattern of LFM2's layers repeats
        or any(get(name, None) not in (None, config.hidden_size) for name in EMBEDDING_SIZES)
    )


def _at_chosen_widths(config: Any) -> tuple[Any, dict[str, tuple[int, int]]]:
    """(the config at the chosen widths, symbol -> (chosen width, own width))."""
    values, own, new = at_widths(config, WIDTHS)
    if new["h"] != WIDTHS["h"]:
        del own["h"]  # the hidden size is g * m * d, so h is no symbol of its own
    if config.model_type in ONE_PROJECTION:
        del own["m"]  # m stays as it is: the one projection has a factor m + 2
    # A width of 1 (m with as many key-value heads as query heads) is no factor.
    return models.resized(config, **values), {
        name: (new[name], value) for name, value in own.items() if new[name] > 1
    }


def _attention(recipe: Recipe, usual: Structure, card: GPU, unit: int) -> str:
    """How attention is computed on a GPU: the implementation, and SDPA's kernels on this GPU.

    Empty if the head size is not a multiple of `unit`, if kernels round it up, or if SDPA chooses
    another kernel for it than for the recorded head size. The shared structure does not describe
    the recipe then.
    """
    if recipe.attention == "eager":
        return "eager"
    size = usual.widths["d"][1]
    # Flash attention's backward rounds head sizes above 192 up to 256 (`scratch._of_flash`).
    if size % unit or 192 < size < 256:
        return ""
    if recipe.attention == "flash_attention_2":
        return recipe.attention
    asked = COMPUTED_IN[recipe.precision], list(card.capability), changes_of_sdpa()
    routes = _routes(recipe.model, *asked)
    if _routes(recipe.model, *asked, size) != routes:
        return ""
    return "sdpa: {}, with a mask {}".format(*routes)


def with_matching_state_dtypes(recipe: Recipe, structure: Structure) -> Recipe:
    """The recipe, at other widths if need be, with 8-bit states of the same tensors as recorded.

    Raises ValueError if none of `LIKE_WIDTHS` has such states.
    """
    if not structure.widths or _states_are_alike(recipe, structure):
        return recipe
    config = models.config(recipe.model)
    rank: dict[str, Any] = {"lora_rank": LIKE_RANK} if recipe.lora_rank else {}
    for widths in LIKE_WIDTHS:
        values, _, _ = at_widths(config, widths)
        like = replace(recipe, model=models.resized(config, **values), **rank)
        # At other widths the model may be of another structure.
        usual = shared_structure(like.model)
        weights = len(shapes_of(like.model, recipe.task))
        if weights != len(shapes_of(recipe.model, recipe.task)):
            continue  # a size that is not in `at_widths` decides about a weight
        if usual and usual.key == structure.key and _states_are_alike(like, structure):
            return like
    raise ValueError(f"no widths at which states of {recipe.model_name} are as at the chosen ones")


def _states_are_alike(recipe: Recipe, usual: Structure) -> bool:
    """Whether the same weights have 8-bit and paged states as at the chosen widths.

    True for optimizers that are not bitsandbytes'.
    """
    if not is_of_bitsandbytes(recipe.optimizer):
        return True

    def kinds(shapes: Iterable[Sequence[int]], rank: int) -> list[list[bool]]:
        # With LoRA the two matrices of each adapter are trained, [rank, in] and [out, rank]. So is
        # a narrow matrix: a classification head, which peft trains in full.
        if recipe.lora_rank:
            matrices = [shape for shape in shapes if len(shape) == 2]
            shapes = [shape for shape in matrices if min(shape) < NARROW]
            shapes += [(rank, side) for shape in matrices for side in shape]
        # The second limit is 0, and so always met, for an optimizer that does not page.
        least = LEAST_8BIT, LEAST_PAGED * OPTIMIZERS[recipe.optimizer].paged
        sizes = map(math.prod, shapes)
        return [[size >= few for few in least] for size in sizes]

    chosen, own = (of(recipe.model, recipe.task) for of in (_shapes_at_chosen_widths, shapes_of))
    return kinds(chosen, LARGEST_RANK) == kinds(own, recipe.lora_rank)


@remembered
def _shapes_at_chosen_widths(model: Model, task: str) -> list[list[int]]:
    """As `shapes_of`, for a model at the chosen widths."""
    return shapes_of(_at_chosen_widths(models.config(model))[0], task)


# ---------------------------------------------------------------------- exact structures


def exact_structure(recipe: Recipe, card: GPU, of_updates: bool = False) -> Structure:
    """The structure of a recipe's passes, or of its update, with the model's own widths fixed."""
    values, other_names, _ = models.facts_of(recipe.model)
    key_fields = {name: value for name, value in values.items() if name not in NO_STRUCTURE}
    for name in LENGTHS:
        name = other_names.get(name, name)
        if key_fields.get(name):
            key_fields[name] = True
    key_fields |= {"attention": recipe.attention, "card": card_class(card.capability)}
    if changes_of_sdpa():
        key_fields["changes of sdpa"] = changes_of_sdpa()
    # The LoRA rank is fixed, too, where it decides more than bytes. bitsandbytes keeps the states
    # of small adapters in 32 bits and unpaged. Sharded ranks gather base weights and adapters in
    # one buffer. Its bytes are a sum, not a product of sizes.
    decides = of_updates and is_of_bitsandbytes(recipe.optimizer) or is_moved_by_sharding(recipe)
    rank = not (recipe.lora_rank and decides)
    key_fields["rank"] = rank or recipe.lora_rank
    return Structure(json.dumps(key_fields, sort_keys=True), recipe.model, {}, rank)
