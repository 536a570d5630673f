"""The calculator panel: memory and time of a training on a GPU, computed in the page.

The page holds the moments of traces that memlab ships (`memlab.panels.moments`), and the GPUs and
models of the catalogues. Its script, assets/formula.js, evaluates them for any setting of the
switches. Known limitation: the order of the events is not in the page, so the script gives reserved
memory as a range.
"""

import base64
import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from memlab import models
from memlab.book.colours import COLOURS
from memlab.card import step_time
from memlab.card.kernels import sdpa
from memlab.fields import one_of
from memlab.footprint import Category, StepTime
from memlab.gpus import ANY_CARD, GPU, GPUS, find_gpu
from memlab.models import Model
from memlab.panels.packed_tables import PackedTables, has_traces
from memlab.panels.panel import Panel
from memlab.panels.sandbox import SIZES
from memlab.planner.space import HALF, NF4
from memlab.predict.fit import CONTEXT_MARGIN, MARGIN
from memlab.predict.recipe_log import refuse_format
from memlab.predict.shipped import Shipped
from memlab.predict.structure import SAME_ROPE, Structure, structures
from memlab.predict.traces import keys_of, usual_sizes
from memlab.predict.widths import HEAD_SIZES, heads_of_a_key, size_field_names
from memlab.spec.optimizers import OPTIMIZERS
from memlab.spec.recipe import AUTOCAST, COMPUTED_IN, Recipe
from memlab.trace import reductions, work
from memlab.trace.patches import replaced
from memlab.trace.symbols import ROUNDED

# Field of a recipe -> its choices: those for which traces are recorded (tools/record_traces.py).
CHOICES = {
    "precision": ("fp32", "fp16-amp", "bf16-amp", "bf16"),
    "optimizer": tuple(name for name in OPTIMIZERS if name != "adamw_torch_loop"),
    "checkpointing": ("none", "non-reentrant"),
    "attention": ("sdpa", "eager"),
}
# What is trained: the calculator's name -> fields of a recipe.
RANK = 8
TRAINED: dict[str, dict[str, Any]] = {
    "every weight": {},
    "all but the embeddings": {"freeze": ("embeddings",)},
    "LoRA": {"lora_rank": RANK},
    "LoRA on a 16-bit base": {"lora_rank": RANK, **HALF},
    "LoRA on NF4": {"lora_rank": RANK, **NF4},
}
# The fields of a recipe that say what is trained (PARTS), and their defaults (PLAIN).
OF_TRAINED = "freeze lora_rank lora_targets lora_dropout lora_fp32 base double_quant"
PARTS = (*OF_TRAINED.split(), "compute_dtype", "upcast")
PLAIN = {field.name: field.default for field in dataclasses.fields(Recipe) if field.name in PARTS}
NUMBERS = ("batch_size", "seq_len", "accumulation", "lora_rank")
SWITCHES = ("model", "gpu", *NUMBERS, "trained", *CHOICES)
# The switches that select the trace of a half. The passes also depend on whether there is gradient
# accumulation. formula.js computes the place of a half from this order.
WAYS = {
    "pass": ("trained", "precision", "attention", "checkpointing"),
    "update": ("trained", "precision", "optimizer"),
}
# Constants that the script shares with memlab: of the allocator, of the margins that are kept free,
# and of the buffers of reductions.
RULES = SIZES | {"MARGIN": MARGIN, "CONTEXT_MARGIN": CONTEXT_MARGIN}
RULES |= {n: getattr(reductions, n) for n in "ACCUMULATED THREADS WARP LEAST MOST".split()}
START = Recipe(
    "qwen3-0.6b",
    batch_size=8,
    precision="fp16-amp",
    optimizer="adamw_torch_fused",
    attention="sdpa",
)
# The example buttons: name -> the switches that differ from START.
_T4 = {"gpu": "T4", "batch_size": 8, "seq_len": 512}
_SPARING = {"batch_size": 2, "seq_len": 2048, "accumulation": 8, "checkpointing": "non-reentrant"}
_LORA = {"trained": "LoRA on NF4", "precision": "bf16-amp"}
PRESETS = {
    "too large for a T4": {"model": "qwen3-0.6b"} | _T4,
    "free T4": {"model": "bert-large"} | _T4,
    "24 GB card": {"model": "qwen3-8b", "gpu": "RTX-4090"} | _SPARING | _LORA,
    "H100": {"model": "llama-3-8b", "gpu": "H100", "precision": "bf16", "optimizer": "adamw_8bit"}
    | _SPARING,
}
LONGEST_HEAD = 256  # the largest head size that is looked at
# Fields that a config may lack. A config with such a field has another structure than one without.
OPTIONAL = (*models.WIDTHS, *HEAD_SIZES, "sliding_window")


@contextlib.contextmanager
def of_shipped_traces() -> Iterator[None]:
    """Choose attention kernels as the PyTorch release does with which the traces were recorded."""
    kernels = sdpa.kernels_that_share_keys(Shipped.of_memlab().versions["torch"])
    with replaced((sdpa, "SHARES_KEYS", kernels)):
        yield


@functools.cache
def names() -> list[str]:
    """The models of the catalogue for which memlab ships traces of the start recipe on a T4."""
    usual, card = START.but(seq_len=1), find_gpu("T4")
    named = [name for name in models.MODELS if not name.endswith("-tiny")]
    return [name for name in named if has_traces(usual.but(model=name), card)]


class Calculator(Panel):
    """Peak by category, fit and time of a training, for any setting of its switches.

    recipe: the recipe that is shown first, of a named model. Without one, the panel has all
        switches, all models with traces, all GPUs, and more explanations.
    fields: the switches of the panel, from `SWITCHES`; everything else stays as in the recipe.
    gpu: the GPU that is shown first.

    The page gets the moments of all traces that the switches can select.

    Raises ValueError for an unknown switch, model or GPU, and for a number format that the GPU does
    not have. Recipes with several ranks, with expandable segments or without a shipped trace raise
    ValueError too.
    """

    kind = "calculator"
    still = (
        "The calculator needs scripts. Without them, memlab simulate on a command line and "
        "memlab.simulate in Python say more."
    )

    @of_shipped_traces()
    def __init__(self, recipe: Recipe | None = None, *fields: str, gpu: str = "T4"):
        self.has_all, self.recipe, self.card = recipe is None, recipe or START, find_gpu(gpu)
        self.fields = tuple(one_of("switch", name, SWITCHES) for name in fields or SWITCHES)
        one_of("model", self.recipe.model, names())
        refuse_format(self.recipe, self.card)
        if self.recipe.ranks > 1:
            raise ValueError(
                f"ranks is {self.recipe.ranks}: a calculator is for one card, allowed is 1; "
                "simulate covers more"
            )
        if self.recipe.expandable_segments:
            raise ValueError(
                "expandable_segments is True: a calculator has the allocator's default settings, "
                "allowed is False; simulate covers more"
            )
        if not has_traces(self.recipe, self.card):
            raise ValueError(f"no trace is kept of {self.recipe} on {self.card.name}: simulate it")
        # What the recipe trains: one of TRAINED whatever its rank, else a choice of its own.
        own = {name: getattr(self.recipe, name) for name in PLAIN}
        if own["compute_dtype"] == COMPUTED_IN[self.recipe.precision]:
            own["compute_dtype"] = None  # it follows the switch for the precision
        own = {name: value for name, value in own.items() if value != PLAIN[name]}
        of_any_rank = own | ({"lora_rank": RANK} if own.get("lora_rank") else {})
        named = [name for name, changes in TRAINED.items() if changes == of_any_rank]
        self.own = named[0] if named else "as in the recipe"
        self.trained = (TRAINED if "trained" in self.fields else {}) | {self.own: own}
        self.choices = {"trained": tuple(self.trained)}
        # The recipe's own value is always a choice, and the only one without a switch.
        for name, choices in CHOICES.items():
            in_recipe = (getattr(self.recipe, name),)
            wanted = choices if name in self.fields else in_recipe
            self.choices[name] = tuple(dict.fromkeys(wanted + in_recipe))

    def data(self) -> dict:
        text = json.dumps(self.tables(), separators=(",", ":"))
        return {"packed": base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()}

    @of_shipped_traces()
    def tables(self) -> dict:
        """Everything that the script gets: constants, choices, models, GPUs and moments."""
        pack, described, offered, families = PackedTables(), {}, {}, {}
        # GPUs that take the same attention kernels share their traces: one GPU of each class
        # stands for all.
        cards = [*self._cards(), ANY_CARD]
        classes: dict[tuple, GPU] = {}
        for card in cards:
            classes.setdefault(routes_of(card), card)
        routes, keys = list(classes), functools.cache(self._keys)
        for model in names() if "model" in self.fields else [str(self.recipe.model)]:
            structure = _structure(model)
            text = structure.key
            # Models of one structure share their traces too. Only the sizes are their own.
            if text not in described:
                settings = _described(models.config(model), structure)
                of = models.default_task(model), _grouped(models.config(model))
                passes, updates = zip(*(keys(*of, card) for card in classes.values()), strict=True)
                # The key of a half is the structure's key and what follows from the switches. An
                # update runs no attention, so it is the same on every GPU.
                described[text] = settings | {
                    "passes": [[pack.place(text + way) for way in ways] for ways in passes],
                    "updates": [pack.place(text + way) for way in updates[0]],
                }
            sizes = structure.sizes(Recipe(model, seq_len=1))
            offered[model] = {
                "structure": list(described).index(text),
                # Batch, length and LoRA rank come from the switches.
                "dimensions": {name: n for name, n in sizes.items() if name not in "bsr"},
                "layers": models.config(model).num_hidden_layers,
                "longest": models.max_length(model),
                "window": getattr(models.config(model), "sliding_window", None),
                "hub": models.MODELS[model],
                "auto": models.AUTO_CLASSES[models.default_task(model)],
            }
            if self.has_all:
                families[_model_type(structure)] = family(_model_type(structure))
        return {
            "presets": PRESETS if self.has_all else {},
            "start": {
                "model": self.recipe.model,
                "gpu": self.card.name,
                "trained": self.own,
                **{name: getattr(self.recipe, name) for name in (*NUMBERS, *CHOICES)},
                "lora_rank": self.recipe.lora_rank or RANK,
            },
            "defaults": {
                field.name: field.default
                for field in dataclasses.fields(Recipe)
                if field.name in (*NUMBERS, *CHOICES)
            },
            "whole": self.has_all,
            "fields": self.fields,
            "choices": self.choices,
            "trained": {name: _options(changes) for name, changes in self.trained.items()},
            "ways": WAYS,
            "models": offered,
            # The last one (ANY_CARD) lends its rules to a GPU that is given as a number of GiB.
            "cards": [card_values(c) | {"attention": routes.index(routes_of(c))} for c in cards],
            "structures": list(described.values()),
            "families": families,
            "versions": Shipped.of_memlab().versions,
            **_constants(),
            **pack.tables(),
        }

    def _cards(self) -> list[GPU]:
        return list(GPUS.values()) if "gpu" in self.fields else [self.card]

    def _keys(self, task: str, grouped: bool, card: GPU) -> tuple[list[str], list[str]]:
        """(keys of the passes, keys of the updates) of a task, without the structure's part.

        grouped: whether the models have fewer key heads than query heads. The keys are in the order
        of the choices in `WAYS`. Each pass comes twice, without and with gradient accumulation.
        """
        # Any model of the kind will do: what follows the structure in a key does not name it.
        model = next(
            name
            for name in names()
            if models.default_task(name) == task and _grouped(models.config(name)) == grouped
        )

        def cases(names: Iterable[str], **more: tuple) -> Iterator[Sequence[str]]:
            choices = {name: self.choices[name] for name in names} | more
            for values in itertools.product(*choices.values()):
                try:
                    recipe = self._recipe(model, **dict(zip(choices, values, strict=True)))
                except ValueError:  # a base in half precision without autocast
                    yield "", ""  # a key without a trace: `place` gives None
                    continue
                pair = next(structures(recipe, card, ignore_small_tensors=True))
                yield [key.removeprefix(pair[0].key) for key in keys_of(recipe, *pair)]

        passes = [passed for passed, _ in cases(WAYS["pass"], accumulation=(1, 2))]
        return passes, [updated for _, updated in cases(WAYS["update"])]

    def _recipe(self, model: Model, trained: str, **changes: Any) -> Recipe:
        """The recipe with another model and what it trains, at the usual sizes of traces."""
        values = {
            field.name: getattr(self.recipe, field.name) for field in dataclasses.fields(Recipe)
        }
        values |= {"model": model, "task": None, "seq_len": 1, "ranks": 1, "sharding": "ddp"}
        values |= PLAIN | self.trained[trained]
        return usual_sizes(Recipe(**values | changes))


def _structure(model: Model) -> Structure:
    """The structure of a model: its config without sizes (`memlab.predict.structure`)."""
    return next(structures(Recipe(model, seq_len=1), ANY_CARD, ignore_small_tensors=True))[0]


def _model_type(structure: Structure) -> str:
    """The model type of a structure."""
    return json.loads(structure.key)["model_type"]


def _described(config: Any, structure: Structure) -> dict:
    """What the script compares a pasted config with: its settings, and which of them are sizes."""
    settings = json.loads(structure.key)
    sizes = size_field_names(config)
    sizes += [n for n in settings if getattr(config, n) != getattr(structure.config, n)]
    sizes = [name for name in dict.fromkeys(sizes) if settings.get(name)]
    return {
        "model_type": settings["model_type"],
        "sizes": sizes,
        "settings": {name: value for name, value in settings.items() if name not in sizes},
        # Query heads per key head; None allows any number above 1.
        "heads_of_a_key": None if "m" in structure.widths else heads_of_a_key(config),
    }


def _grouped(config: Any) -> bool:
    """Whether several query heads share a key head."""
    return heads_of_a_key(config) > 1


def family(model_type: str) -> dict:
    """The names and defaults of a config class, for values that a config.json leaves out."""
    kind = CONFIG_MAPPING[model_type]
    plain = {field.name: field.default for field in dataclasses.fields(kind)}
    values = {n: v for n, v in plain.items() if v is None or isinstance(v, (bool, int, str))}
    settings = _described(kind(), _structure(kind()))["settings"]
    # Lists have one entry per layer, and a pasted model may have another number of layers.
    settings = {n: v for n, v in settings.items() if not isinstance(v, list)}
    return {"aliases": kind.attribute_map, "defaults": values | settings}


def _options(changes: dict) -> dict:
    """An entry of TRAINED for the script: its values, and its options of the command line."""
    fields = {field.name: field for field in dataclasses.fields(Recipe)}
    options = []
    for name, value in changes.items():
        if name == "lora_rank":
            continue  # it has a switch of its own
        if value is False:
            name = fields[name].metadata["off"][0]
        options.append(f"--{name.replace('_', '-')}")
        if isinstance(value, (list, tuple)):
            value = ",".join(map(str, value))
        options += [str(value)] * (not isinstance(value, bool))
    return {"changes": changes, "options": options}


def card_values(card: GPU) -> dict:
    """The values of a GPU that a calculator's script gets; sizes in bytes."""
    return {
        "name": card.name,
        "total": card.total_memory,
        "context": card.context or 0,
        "workspace": card.workspace,
        "threads": card.threads,
        "bf16": "bfloat16" in card.native_dtypes,
        "processors": card.processors,
        "hopper": card.capability == (9, 0),
        "clock": card.bandwidth and card.clock,
        "rates": list(card.rates),
        "reached": {dtype: card.reached(dtype) for dtype in card.rates},
        "traffic": card.bandwidth and card.traffic,
        "cache": card.cache,
        "shares_keys": shares_keys(card),
        "heads": usual_heads(card.capability),
    }


def routes_of(card: GPU, size: int = 64) -> tuple:
    """The attention kernels of a GPU for a head size, in every format, with and without GQA."""
    return tuple(
        sdpa.model_routes(dtype, shared, card.capability, size)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for shared in (False, True)
    )


@functools.cache
def usual_heads(capability: tuple[int, int]) -> list[list[int]]:
    """Ranges [first, last] of head sizes, in steps of 8, that take the kernels of head size 64."""
    card = dataclasses.replace(ANY_CARD, capability=capability)
    ranges: list[list[int]] = []
    for size in range(8, LONGEST_HEAD + 8, 8):
        if routes_of(card, size) != routes_of(card):
            continue
        if ranges and ranges[-1][1] == size - 8:
            ranges[-1][1] = size
        else:
            ranges.append([size, size])
    return ranges


def _constants() -> dict:
    """The constants that the script shares with memlab's modules."""
    rules = {name: getattr(work, name) for name in ("BLOCKS_OF_LAUNCH", "ELEMENTS_OF_BLOCK")}
    rules["CALLS_OF_CODED"] = step_time.CALLS_OF_CODED
    return {
        "rules": rules | RULES,
        "rounded": ROUNDED,
        "worse": [name for name, optimizer in OPTIMIZERS.items() if optimizer.worse],
        "tiles": work.TILES | {"": work.TENSOR_CORE_TILE},
        "tensors_of_launch": [1, *work.TENSORS_OF_LAUNCH.values()],
        "reaches": {
            name: dataclasses.asdict(getattr(step_time, name.upper()))
            for name in ("best", "expected", "worst")
        },
        "phases": step_time.PHASES,
        "parts": StepTime.PARTS,
        "categories": list(Category),
        "colours": list(COLOURS.values()),
        "widths": models.WIDTHS,
        "head_sizes": HEAD_SIZES,
        "optional_sizes": OPTIONAL,
        "same_rope": SAME_ROPE,
        "autocast": AUTOCAST,
    }


def shares_keys(card: GPU) -> dict[int, bool]:
    """Bytes per number -> whether a fused kernel accepts fewer key heads than query heads."""
    formats = {2: torch.float16, 4: torch.float32}
    return {
        each: sdpa.model_routes(dtype, True, card.capability)[0] != "math"
        for each, dtype in formats.items()
    }
