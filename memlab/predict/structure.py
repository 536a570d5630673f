"""What of a recipe decides which events happen, and which sizes only say how large they are.

A model's structure is its config without sizes. Where its dimensions are the usual ones, all of
them are sizes, and models of a family share a structure; else its widths belong to the structure,
and micro-batch, length, LoRA rank, positions and window are the sizes.
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

# Kinds of stretched rotary positions whose tensors are those of plain ones.
SAME_ROPE = ("default", "linear", "llama3", "yarn")
# Of adapters at the chosen sizes; what is narrower than the second, a router, has none.
LARGEST_RANK, NARROW = 512, 32
LAYERS = 4  # of a model that stands for all of a structure, at least
# Elements: bitsandbytes keeps the states of smaller tensors in 32 bits, and on the card.
LEAST_8BIT, LEAST_PAGED = 4096, 100_000


class TraceDomain(NamedTuple):
    """What of a recipe's sizes decides which events happen, and not only how large they are.

    one_sequence: with one of them dimensions can be swapped without a copy. alignment: the greatest
    common divisor of the length and 16, because kernels pad masks. inside: whether the length is
    below the window of attention, where no mask is made. batches: micro-batches whose events
    differ; the first makes gradients, the second adds to them, and the last of several ranks
    reduces them.
    """

    one_sequence: bool
    alignment: int
    inside: bool
    batches: int

    @classmethod
    def of(cls, recipe: Recipe) -> TraceDomain:
        """Those of a recipe."""
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

    key: what is special about it, as a text. model: whose it is. widths: symbol -> (chosen, own),
    empty where widths are part of the structure. rank: whether the rank of adapters is a size.
    attention: the kernels of the passes, where the key leaves them open.
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
        """The values of all symbols in a recipe, as far as its model has them."""
        config = models.settings(recipe.model)
        sizes = {
            "b": recipe.batch_size,
            "s": recipe.seq_len,
            "r": self.rank and recipe.lora_rank,
            "P": getattr(config, "max_position_embeddings", None),
            "w": getattr(config, "sliding_window", None),
        }
        sizes |= {name: own for name, (_, own) in self.widths.items()}
        return {name: value for name, value in sizes.items() if value}

    def chosen(self, recipe: Recipe, around: TraceDomain) -> tuple[Recipe, dict[str, int]]:
        """(the recipe at chosen sizes, with its model made as long as they ask for; the sizes).

        Raises ValueError where no sizes can be told apart.
        """
        model = models.with_layers(self.config, 2)
        shapes = shapes_of(self.config, recipe.task)
        own = {size for shape in shapes for size in shape}
        own |= {value for value in vars(model).values() if type(value) is int}
        if is_moved_by_sharding(recipe):
            own |= _sharded_sizes(replace(recipe, model=model))
        narrow = [min(shape) for shape in shapes if len(shape) == 2 and min(shape) >= NARROW]
        widths = {name: chosen for name, (chosen, _) in self.widths.items()}
        sizes = chosen_sizes(
            own,
            one_sequence=around.one_sequence,
            alignment=around.alignment,
            inside=around.inside,
            rank=min([LARGEST_RANK, *narrow]) if self.rank and recipe.lora_rank else None,
            widths=widths.values(),
        )
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
        if self.widths:  # so that layers can be seen to repeat
            model = models.with_layers(model, max(model.num_hidden_layers, LAYERS))
        return replace(recipe, model=model, **changes), sizes | widths


def _sharded_sizes(recipe: Recipe) -> set[int]:
    """As `memlab.workloads.sharding.sharded_sizes`, of a recipe's model."""
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
    """The structures that may be those of a recipe's passes and updates, the widest shared first.

    ignore_small_tensors: whether they may be those of a model whose small weights have 8-bit
    states, too, and in which kernels do not pad heads.
    """
    structure, own = shared_structure(recipe.model), exact_structure(recipe, card)
    updates = exact_structure(recipe, card, of_updates=True)
    if structure is not None and recipe.ranks == 1:
        attention = _attention(recipe, structure, card, 8 if ignore_small_tensors else 32)
        if attention:
            structure = replace(structure, attention=attention)
            alike = ignore_small_tensors or _states_are_alike(recipe, structure)
            yield structure, structure if alike else updates
    yield own, updates


def has_no_trace(recipe: Recipe, card: GPU) -> bool:
    """Whether a recipe is known to have no trace of passes and updates for all sizes.

    A loss in parts of tokens has as many parts as the tokens ask for. Where the backward pass steps
    there are no updates apart from it. Copies to the host have terms of no size. Where flash-attn
    gets borders between sequences, there is one more of these than sequences. The gated delta rule
    of Qwen3.5 and its like loops over the chunks of a sequence.
    """
    parts = recipe.loss != "whole" or recipe.step_in_backward
    away = recipe.activation_offload or recipe.optimizer_offload != "none"
    borders = recipe.attention == "flash_attention_2" and (recipe.packed or recipe.padded)
    loops = hasattr(models.settings(recipe.model), models.OF_DELTA_RULE)
    return parts or away or borders or loops or has_fused_products(recipe, card)


def has_fused_products(recipe: Recipe, card: GPU) -> bool:
    """Whether bitsandbytes multiplies so few tokens with a 4-bit weight without writing it out.

    Which weights of which shapes at how many tokens is a table of its own.
    """
    if recipe.base not in FOUR_BITS or recipe.compute_dtype is None:
        return False
    card_kind = [card.processors, *card.capability]
    fused = _fused_tokens(recipe.model, recipe.task, recipe.compute_dtype, card_kind)
    return recipe.batch_size * recipe.seq_len in fused


@remembered
def _fused_tokens(model: Model, task: str, dtype: str, card: list[int]) -> list[int]:
    """The numbers of tokens at which some product of a model is fused.

    card: its multiprocessors and its compute capability.
    """
    from memlab.card.kernels.bitsandbytes import cuda_module, fuses_4bit_product
    from memlab.workloads.quantized import COMPUTE_DTYPES

    matrices = {tuple(shape) for shape in shapes_of(model, task) if len(shape) == 2}
    return [
        tokens
        for tokens in range(1, cuda_module()._gemm_4bit_custom_max_m + 1)
        if any(fuses_4bit_product(card, COMPUTE_DTYPES[dtype], tokens, *m) for m in matrices)
    ]


# ---------------------------------------------------------------------- the usual dimensions


def shared_structure(model: Model) -> Structure | None:
    """The structure of a model whose widths are `WIDTHS`; None where it has others."""
    values = usual_values(model)
    return None if values is None else Structure(values["key"], model, values["widths"])


@remembered
def usual_values(model: Model) -> dict[str, Any] | None:
    """Key and widths of a model whose widths are `WIDTHS`; None where it has others.

    A config.json names the release that wrote it, and settings that its class does not know any
    more: neither is of the model.
    """
    config = models.config(model)
    layers = getattr(config, "num_hidden_layers", 0)
    if _has_other_widths(config) or not layers:
        return None
    if (getattr(config, "num_decoder_layers", None) or layers) != layers:
        return None
    chosen, own = _at_chosen_widths(config)
    fields = vars(type(config)()).keys() - {"architectures", "transformers_version"}
    values: dict[str, Any] = {"model_type": config.model_type}
    for name, value in vars(chosen).items():
        if isinstance(value, (list, tuple)) and value and len(set(map(str, value))) == 1:
            value = value[0]  # a kind of layer, named for each of them
        if isinstance(value, float):
            value = bool(value) if "drop" in name else None
        if isinstance(value, dict):
            value = _rope(value)
        hidden = name not in fields or name.startswith("_") or name.endswith("token_id")
        hidden |= type(value) is int and ("layers" in name or name == "n_layer")
        if not hidden and isinstance(value, (bool, int, str, list, tuple)):
            values[name] = value
    for name in size_field_names(config):
        if values.get(name):
            values[name] = True
    return {"key": json.dumps(values, sort_keys=True), "widths": own}


@remembered
def _routes(
    model: Model, dtype: str, capability: list[int], changes: list[str], size: int = 64
) -> list[str]:
    """SDPA's kernels for a model at the chosen widths, without a mask and with one.

    dtype: of `COMPUTED_IN`. changes: `changes_of_sdpa`, which decide, too.
    """
    from memlab.card.kernels.sdpa import model_routes
    from memlab.workloads.quantized import COMPUTE_DTYPES

    shares = heads_of_a_key(_at_chosen_widths(models.config(model))[0]) > 1
    return list(model_routes(COMPUTE_DTYPES[dtype], shares, (capability[0], capability[1]), size))


def changes_of_sdpa() -> list[str]:
    """How this process takes other kernels of SDPA than its release of PyTorch does by itself."""
    if "torch" not in sys.modules:  # nobody has changed it yet
        return []
    import torch

    from memlab.card.kernels import sdpa

    changes = [f"{name} is off" for name, is_on in sdpa.SDPA_ROUTES.items() if not is_on()]
    if sdpa.SHARES_KEYS != sdpa.kernels_that_share_keys(torch.__version__):
        changes += [f"{name} shares keys" for name in sorted(sdpa.SHARES_KEYS)]
    return changes


def _rope(parameters: dict) -> str | None:
    """What of rotary positions decides which tensors they have."""
    kind = parameters.get("rope_type")
    kind = "default" if kind in SAME_ROPE else kind
    share = parameters.get("partial_rotary_factor", 1.0)
    return kind if share == 1 else f"{kind}, of {share} of a head"


def _has_other_widths(config: Any) -> bool:
    """Whether a config has other widths than `WIDTHS`."""
    get = functools.partial(getattr, config)
    return bool(
        config.is_heterogeneous
        or get("num_attention_heads", None) is None
        or get("num_kv_shared_layers", None)  # some of its layers take the keys of others
        or get("num_key_value_heads", None) == 1  # that dimension is swapped without a copy
        # Its projection to queries, keys and values has the prime factor of a head's size.
        or (config.model_type in ONE_PROJECTION and (heads_of_a_key(config) + 2) % 5 == 0)
        or get("kv_lora_rank", None)  # latent attention has ranks and two sizes of heads
        or any(get(name, None) not in (None, config.hidden_size) for name in EMBEDDING_SIZES)
    )


def _at_chosen_widths(config: Any) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The config with `WIDTHS`, and symbol -> (chosen, own)."""
    values, own, new = at_widths(config, WIDTHS)
    if new["h"] != WIDTHS["h"]:
        del own["h"]  # it is g * m * d
    if config.model_type in ONE_PROJECTION:
        del own["m"]  # m + 2 of them come of that weight
    return models.resized(config, **values), {
        name: (new[name], value) for name, value in own.items() if new[name] > 1
    }


def _attention(recipe: Recipe, usual: Structure, card: GPU, unit: int) -> str:
    """How attention is computed on a card: the implementation, and the kernels of sdpa there.

    Empty where the head size is no multiple of `unit`, or SDPA takes another kernel for it than for
    the recorded head size.
    """
    if recipe.attention == "eager":
        return "eager"
    if recipe.attention == "flash_attention_2":
        return "" if usual.widths["d"][1] % unit else recipe.attention
    size = usual.widths["d"][1]
    asked = COMPUTED_IN[recipe.precision], list(card.capability), changes_of_sdpa()
    routes = _routes(recipe.model, *asked)
    if size % unit or _routes(recipe.model, *asked, size) != routes:
        return ""
    return "sdpa: {}, with a mask {}".format(*routes)


def with_matching_state_dtypes(recipe: Recipe, structure: Structure) -> Recipe:
    """The recipe at other widths, so that the same tensors get 8-bit states as in the recording.

    Raises ValueError where none of a few widths does.
    """
    if not structure.widths or _states_are_alike(recipe, structure):
        return recipe
    config = models.config(recipe.model)
    rank: dict[str, Any] = {"lora_rank": LIKE_RANK} if recipe.lora_rank else {}
    for widths in LIKE_WIDTHS:
        values, _, _ = at_widths(config, widths)
        like = replace(recipe, model=models.resized(config, **values), **rank)
        usual = shared_structure(like.model)
        weights = len(shapes_of(like.model, recipe.task))
        if weights != len(shapes_of(recipe.model, recipe.task)):
            continue  # a size that is not in `at_widths` decides about a weight
        if usual and usual.key == structure.key and _states_are_alike(like, structure):
            return like
    raise ValueError(f"no widths at which states of {recipe.model_name} are as at the chosen ones")


def _states_are_alike(recipe: Recipe, usual: Structure) -> bool:
    """Whether the states of the same weights are in 8 or 4 bits at the chosen widths."""
    if not is_of_bitsandbytes(recipe.optimizer):
        return True

    def kinds(shapes: Iterable[Sequence[int]], rank: int) -> list[list[bool]]:
        if recipe.lora_rank:  # a head of few classes is trained whole
            matrices = [shape for shape in shapes if len(shape) == 2]
            shapes = [shape for shape in matrices if min(shape) < NARROW]
            shapes += [(rank, side) for shape in matrices for side in shape]
        least = LEAST_8BIT, LEAST_PAGED * OPTIMIZERS[recipe.optimizer].paged
        sizes = map(math.prod, shapes)
        return [[size >= few for few in least] for size in sizes]

    chosen, own = (of(recipe.model, recipe.task) for of in (_shapes_at_chosen_widths, shapes_of))
    return kinds(chosen, LARGEST_RANK) == kinds(own, recipe.lora_rank)


@remembered
def _shapes_at_chosen_widths(model: Model, task: str) -> list[list[int]]:
    """As `shapes_of`, of a model whose widths are the usual ones, at the chosen ones."""
    return shapes_of(_at_chosen_widths(models.config(model))[0], task)


# ---------------------------------------------------------------------- dimensions of its own


def exact_structure(recipe: Recipe, card: GPU, of_updates: bool = False) -> Structure:
    """The structure of a recipe's passes, or of its updates, to which widths belong."""
    values, other_names, _ = models.facts_of(recipe.model)
    key_fields = dict(values)
    for name in LENGTHS:
        name = other_names.get(name, name)
        if key_fields.get(name):
            key_fields[name] = True
    key_fields |= {"attention": recipe.attention, "card": card_class(card.capability)}
    if changes_of_sdpa():
        key_fields["changes of sdpa"] = changes_of_sdpa()
    # A rank may decide which states are kept in 8 or 4 bits, and on the card; and what ranks gather
    # is a sum of base and adapters, no product of sizes.
    decides = of_updates and is_of_bitsandbytes(recipe.optimizer) or is_moved_by_sharding(recipe)
    rank = not (recipe.lora_rank and decides)
    key_fields["rank"] = rank or recipe.lora_rank
    return Structure(json.dumps(key_fields, sort_keys=True), recipe.model, {}, rank)
