"""The calculator: a training on a card, by memlab's closed form, evaluated in the page."""

import base64
import dataclasses
import functools
import gzip
import itertools
import json

import torch
from transformers import CONFIG_MAPPING

from memlab import models
from memlab.book.panel import Panel
from memlab.book.panel import read as read_file
from memlab.book.show import COLOURS
from memlab.card import op_cost, step_time
from memlab.card.kernels.sdpa import model_routes
from memlab.card.links import LINKS, link_rate, links_of
from memlab.fields import one_of
from memlab.footprint import Category, StepTime
from memlab.gpus import ANY_CARD, GPU, GPUS, find_gpu
from memlab.planner.space import NF4
from memlab.predict import closed_form_ranks
from memlab.predict.closed_form import coefficients, formula, primed, read
from memlab.predict.closed_form_serving import shares_keys
from memlab.predict.fit import CONTEXT_MARGIN, MARGIN
from memlab.predict.structure import HEAD_SIZES, SAME_ROPE
from memlab.spec.recipe import COMPUTED_IN, FULLY_SHARDED, SHARDED_OPTIMIZERS, Recipe
from memlab.trace import allocator

# What can be chosen: that of which coefficients are kept (tools/derive_coefficients.py).
CHOICES = {
    "precision": ("fp32", "fp16-amp", "bf16-amp", "bf16"),
    "optimizer": (
        "adamw_torch",
        "adamw_torch_fused",
        "adafactor",
        "sgd",
        "adamw_8bit",
        "paged_adamw_8bit",
        "lion_8bit",
    ),
    "checkpointing": ("none", "non-reentrant"),
    "attention": ("sdpa", "eager"),
}
# What is trained, by the calculator's names, and what that is in a recipe.
RANK = 8
TRAINED = {
    "every weight": {},
    "all but the embeddings": {"freeze": ("embeddings",)},
    "LoRA": {"lora_rank": RANK},
    "LoRA on NF4": {"lora_rank": RANK, **NF4},
}
# The fields of a recipe that say what is trained, and their defaults.
PARTS = "freeze lora_rank lora_targets lora_dropout lora_fp32 base block_size double_quant"
PARTS = (*PARTS.split(), "compute_dtype", "upcast")
PLAIN = {one.name: one.default for one in dataclasses.fields(Recipe) if one.name in PARTS}
# Models that have coefficients in hardly any way are left out.
FEW_WAYS = ("deberta-v3-base", "mixtral-8x7b")
NAMES = [name for name in models.MODELS if not name.endswith("-tiny") and name not in FEW_WAYS]
NUMBERS = ("batch_size", "seq_len", "accumulation", "lora_rank")
OWN_LINK = "the card's own"
AMONG = {
    "ranks": (1, 2, 4, 8, 16, 32, 64),
    "sharding": ("ddp", "zero1", "zero2", "zero3"),
    "link": (OWN_LINK, *LINKS),
}
SWITCHES = ("model", "gpu", *NUMBERS, "trained", *CHOICES, *AMONG)
# On which switches a pass and an update depend; a pass also on whether it accumulates.
WAYS = {
    "pass": ("trained", "precision", "attention", "checkpointing"),
    "update": ("trained", "precision", "optimizer"),
}
AUTO = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}
# Of the allocator and of what is kept free.
RULES = "MIN_BLOCK SMALL_REQUEST SMALL_SEGMENT MEDIUM_REQUEST MEDIUM_SEGMENT LARGE_ROUND"
RULES = {name: getattr(allocator, name) for name in RULES.split()}
RULES |= {"MARGIN": MARGIN, "CONTEXT_MARGIN": CONTEXT_MARGIN}
START = Recipe(
    "bert-large",
    batch_size=8,
    precision="fp16-amp",
    optimizer="adamw_torch_fused",
    attention="sdpa",
)
# What a config may have or not, and is another structure then.
OPTIONAL = (*models.WIDTHS, *HEAD_SIZES, "sliding_window")


class Calculator(Panel):
    """Peak by category, fit and time of a training, for any setting of its switches.

    recipe: what it shows first, of a named model. fields: the switches that the page has, of
    `SWITCHES`; the rest is as in the recipe. gpu: the card. Without a recipe it has all switches,
    models of every structure with coefficients, every card, and more to read.

    The coefficients that the switches need are in the page, and its script does what
    `memlab.formula` does. Raises ValueError for an unknown switch, model or card, for a recipe
    outside the closed form's domain, and for one without coefficients.
    """

    kind = "calculator"
    still = (
        "The calculator needs scripts. Without them, memlab simulate on a command line and "
        "memlab.formula in Python say the same."
    )

    def __init__(self, recipe: Recipe | None = None, *fields: str, gpu: str = "T4"):
        self.whole, self.recipe, self.card = recipe is None, recipe or START, find_gpu(gpu)
        self.fields = tuple(one_of("switch", name, SWITCHES) for name in fields or SWITCHES)
        one_of("model", self.recipe.model, NAMES)
        formula(self.recipe, self.card)
        own = {name: getattr(self.recipe, name) for name in PLAIN}
        if own["compute_dtype"] == COMPUTED_IN[self.recipe.precision]:
            own["compute_dtype"] = None  # it goes with the precision
        own = {name: value for name, value in own.items() if value != PLAIN[name]}
        of_any_rank = own | ({"lora_rank": RANK} if own.get("lora_rank") else {})
        named = [name for name, changes in TRAINED.items() if changes == of_any_rank]
        self.own = named[0] if named else "as in the recipe"
        self.trained = (TRAINED if "trained" in self.fields else {}) | {self.own: own}
        self.choices = {"trained": tuple(self.trained)}
        for name, choices in (CHOICES | AMONG).items():
            mine = (getattr(self.recipe, name, OWN_LINK),)
            wanted = choices if name in self.fields else mine
            self.choices[name] = tuple(dict.fromkeys(wanted + mine))

    def source(self) -> str:
        script = read_file("forms.js") + read_file("calculator.js")
        return super().source().replace("/* closed form */", script)

    def data(self) -> dict:
        text = json.dumps(self.known(), separators=(",", ":"))
        return {"packed": base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()}

    def known(self) -> dict:
        """All that the script is given: constants, choices, models, cards, and the coefficients."""
        pack, structures, offered, families = _Pack(), {}, {}, {}
        cards, classes = [*self._cards(), ANY_CARD], {}
        for card in cards:
            classes.setdefault(routes_of(card), card)
        keys = functools.cache(self._keys)
        for model in NAMES if "model" in self.fields else [self.recipe.model]:
            text, settings = _structure(model)
            if text not in structures:
                said = _described(model, settings)
                of = models.default_task(model), said["grouped"]
                passes, updates = zip(*(keys(*of, card) for card in classes.values()), strict=True)
                structures[text] = said | {
                    "passes": [[pack.place(text + way) for way in ways] for ways in passes],
                    "updates": [pack.place(text + way) for way in updates[0]],
                }
            case = read(Recipe(model, seq_len=1))
            offered[model] = {
                "structure": list(structures).index(text),
                "dimensions": {n: case.dimensions[n] for n in case.dimensions if n not in "bsr"},
                "layers": case.layers,
                "longest": models.max_length(model),
                "window": getattr(models.config(model), "sliding_window", None),
                "hub": models.MODELS[model],
                "auto": AUTO[models.default_task(model)],
            }
            if self.whole:
                families[settings["model_type"]] = family(settings["model_type"])
        return {
            "start": {
                "model": self.recipe.model,
                "gpu": self.card.name,
                "trained": self.own,
                **{name: getattr(self.recipe, name) for name in (*NUMBERS, *CHOICES)},
                **{name: getattr(self.recipe, name, OWN_LINK) for name in AMONG},
                "lora_rank": self.recipe.lora_rank or RANK,
            },
            "defaults": {
                one.name: one.default
                for one in dataclasses.fields(Recipe)
                if one.name in (*NUMBERS, *CHOICES, *AMONG)
            },
            "whole": self.whole,
            "fields": self.fields,
            "choices": self.choices,
            "trained": {name: _options(changes) for name, changes in self.trained.items()},
            "ways": WAYS,
            "models": offered,
            # The last one lends its rules to a number of GiB.
            "cards": [
                known_card(card) | {"attention": list(classes).index(routes_of(card))}
                for card in cards
            ],
            "structures": list(structures.values()),
            "families": families,
            "versions": coefficients()["versions"],
            **_constants(),
            **pack.known(),
        }

    def _cards(self) -> list[GPU]:
        return list(GPUS.values()) if "gpu" in self.fields else [self.card]

    def _keys(self, task: str, grouped: bool, card: GPU) -> tuple[list[str], list[str]]:
        """The keys of passes and of updates of a task on a card, as they go on after a structure.

        grouped: of models with fewer key heads than query heads. In the order of the choices, each
        pass without and with accumulation.
        """
        model = next(
            name
            for name in NAMES
            if models.default_task(name) == task and _grouped(models.config(name)) == grouped
        )
        structure, _ = _structure(model)

        def cases(names, **more):
            choices = {name: self.choices[name] for name in names} | more
            for values in itertools.product(*choices.values()):
                yield read(self._recipe(model, **dict(zip(choices, values, strict=True))), card)

        passes = [case.pass_key for case in cases(WAYS["pass"], accumulation=(1, 2))]
        updates = [case.update_key for case in cases(WAYS["update"])]
        return tuple([key.removeprefix(structure) for key in found] for found in (passes, updates))

    def _recipe(self, model, trained, **changes) -> Recipe:
        """A recipe of another model, of the least length, for one way of training."""
        values = {one.name: getattr(self.recipe, one.name) for one in dataclasses.fields(Recipe)}
        values |= {"model": model, "task": None, "seq_len": 1, "ranks": 1, "sharding": "ddp"}
        values |= PLAIN | self.trained[trained]
        return Recipe(**values | changes)

    def __repr__(self) -> str:
        return f"Calculator of {', '.join(self.fields)}"


class _Pack:
    """Coefficients of what is asked for, with halves, operators and terms numbered anew.

    Neighbours have much in common: columns are kept together, and differences in place of numbers,
    which gzip makes a third as large.
    """

    def __init__(self):
        self.places, self.operators, self.terms = {}, {}, {}
        self.columns = {name: [] for name in ("tensors", "beside", "moments", "work", "parameters")}

    def place(self, key: str) -> int | None:
        """The number of a half; None where it is not known."""
        half = coefficients()["halves"].get(key)
        if half and key not in self.places:
            self.places[key] = len(self.places)
            self._add(half)
        return self.places.get(key)

    def _add(self, half) -> None:
        categories = list(Category)
        moments, before = [], {}
        for one in half["moments"]:
            now = {tensor: (once, each) for tensor, once, each in one["counts"]}
            changes = []
            for tensor in before.keys() | now.keys():
                old, new = before.get(tensor, (0, 0)), now.get(tensor, (0, 0))
                if old != new:
                    changes.append((tensor, new[0] - old[0], new[1] - old[1]))
            moments.append([_phase(one["phase"]), *_flat(changes)])
            before = now
        for name, column in {
            "tensors": [[categories.index(name), self._term(t)] for name, t in half["tensors"]],
            "beside": _flat(half["left"] if "left" in half else half["states"]),
            "moments": moments,
            "work": _flat([self._operator(one), *one["counts"]] for one in half["work"]),
            "parameters": [[self._term(t), *rest] for t, *rest in half["parameters"]],
        }.items():
            self.columns[name].append(column)

    def _operator(self, one) -> int:
        row = (
            one["dtype"],
            self._term(one["flops"]),
            tuple(map(self._term, one["result"])),
            tuple(map(self._term, one["moved"])),
            one["lists"],
            self._term(one["elements"]),
            _phase(one["phase"]),
            int(one["recomputed"]),
        )
        return self.operators.setdefault(row, len(self.operators))

    def _term(self, term: int) -> int:
        return self.terms.setdefault(term, len(self.terms)) if term >= 0 else term

    def known(self) -> dict:
        terms = [coefficients()["terms"][term] for term in self.terms]
        return {"terms": terms, "operators": list(self.operators), "halves": self.columns}


def _flat(rows) -> list[int]:
    """Rows as one list, sorted; each begins with the distance from the one before."""
    flat, place = [], 0
    for first, *rest in sorted(rows):
        flat += [first - place, *rest]
        place = first
    return flat


def _phase(name: str) -> int:
    return step_time.PHASES.index(name)


def _structure(model) -> tuple[str, dict]:
    """What is special about a model, as the coefficients' keys begin, and as values."""
    text = read(Recipe(model, seq_len=1)).pass_key
    settings, end = json.JSONDecoder().raw_decode(text)
    return text[:end], settings


def _described(model, settings) -> dict:
    """What the script compares a config with: settings, and the names of those that are sizes."""
    config = models.config(model)
    prime, _ = primed(config)
    sizes = [name for name in settings if getattr(config, name) != getattr(prime, name)]
    return {
        "model_type": settings["model_type"],
        "sizes": sizes,
        "settings": {name: value for name, value in settings.items() if name not in sizes},
        "grouped": _grouped(config),
        "two_stacks": models.default_task(config) == "seq2seq-lm",
    }


def _grouped(config) -> bool:
    """Whether query heads share keys."""
    return primed(config)[1]["m"] > 1


def family(model_type: str) -> dict:
    """A config class: its other names, and what a value is that a config.json leaves out."""
    kind = CONFIG_MAPPING[model_type]
    plain = {one.name: one.default for one in dataclasses.fields(kind)}
    values = {n: v for n, v in plain.items() if v is None or isinstance(v, (bool, int, str))}
    settings = _described(kind(), _structure(kind())[1])["settings"]
    return {"aliases": kind.attribute_map, "defaults": values | settings}


def _options(changes: dict) -> dict:
    """What is trained, for the script: the values, and the options of the command line."""
    fields = {one.name: one for one in dataclasses.fields(Recipe)}
    options = []
    for name, value in changes.items():
        if name == "lora_rank":
            continue  # a switch of its own
        if value is False:
            name = fields[name].metadata["off"][0]
        options.append(f"--{name.replace('_', '-')}")
        if isinstance(value, (list, tuple)):
            value = ",".join(map(str, value))
        options += [str(value)] * (not isinstance(value, bool))
    return {"changes": changes, "options": options}


def known_card(card: GPU) -> dict:
    """What a calculator's script is given of a card."""
    return {
        "name": card.name,
        "total": card.total_memory,
        "context": card.context or 0,
        "workspace": card.workspace,
        "bf16": "bfloat16" in card.native_dtypes,
        "processors": card.processors,
        "rates": card.rates,
        "bandwidth": card.bandwidth,
        "shares_keys": shares_keys(card),
        "longest_head": longest_head(card.capability),
        "links": {name: link_rate(card, name) for name in links_of(card)},
    }


def routes_of(card: GPU, size: int = 64) -> tuple:
    """How a card computes attention with heads of a size, in every format and kind of model."""
    return tuple(
        model_routes(dtype, shared, card.capability, size)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for shared in (False, True)
    )


@functools.cache
def longest_head(capability: tuple[int, int]) -> int:
    """The head size up to which multiples of 8 are computed with the kernels of smaller ones."""
    card = dataclasses.replace(ANY_CARD, capability=capability)
    sizes = itertools.count(8, 8)
    return next(size for size in sizes if routes_of(card, size) != routes_of(card)) - 8


def _constants() -> dict:
    """What the script shares with memlab's modules."""
    rules = {name: getattr(op_cost, name) for name in ("BLOCKS_OF_LAUNCH", "ELEMENTS_OF_BLOCK")}
    rules |= RULES | {"SHALLOW": closed_form_ranks.LAYERS}
    return {
        "rules": rules,
        "tiles": op_cost.TILES | {"": op_cost.TENSOR_CORE_TILE},
        "tensors_of_launch": [1, *op_cost.TENSORS_OF_LAUNCH.values()],
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
        "own_link": OWN_LINK,
        "computed_in": COMPUTED_IN,
        "fully_sharded": FULLY_SHARDED,
        "sharded_optimizers": SHARDED_OPTIMIZERS,
        "errors": json.loads(closed_form_ranks.ERRORS.read_text()),
    }
