"""The memory and the time of a training step in closed form: sums of products of dimensions.

Every tensor of a training step has a size like 4 * b * s * f bytes, and every operator moves and
multiplies such tensors. `derive` finds these products for a family of models and a way of training,
by simulations of small models (`memlab.predict.coefficients`). Nothing is fitted.

A step falls into two halves that know little of each other, and each has coefficients of its own:

- the pass, forward and backward: what the model does, whatever the optimizer, with the kernels of
  attention that the card has (`memlab.card.kernels.sdpa.model_routes`)
- the update: clipping, the optimizer's states and what it makes while it steps, whatever the pass

Of both are kept the moments at which a peak can be, each a list of tensors, and the work of the
operators. At a moment of the pass the states are there, too; at one of the update everything is
that the pass leaves.

The coefficients (memlab/data/coefficients.jsonl.gz) are lines of plain JSON: first `terms`, each
[coefficient, {symbol: power}], and the versions that they are of; then in turn a key and its half.
A half has `tensors` as [category, term], and lists of [tensor, how many in a model of three layers,
how many more with each further layer]: those of each of its `moments`, of what the pass leaves
(`left`) and of the optimizer's `states`. `work` are operators, `parameters` the model's.
"""

import functools
import gzip
import importlib.metadata
import json
from collections import UserDict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memlab import models
from memlab.card.kernels.sdpa import model_routes
from memlab.card.links import link_rate
from memlab.card.op_cost import count_kernels, count_tiles
from memlab.card.step_time import PHASES, Columns, step_time
from memlab.footprint import Category, Footprint, Phase
from memlab.gpus import ANY_CARD, GPU, find_gpu, require_native
from memlab.predict import closed_form_ranks
from memlab.predict.structure import SAME_ROPE, at_widths, trained_as
from memlab.spec.recipe import COMPUTED_IN, Recipe
from memlab.trace.allocator import (
    LARGE_ROUND,
    MEDIUM_REQUEST,
    MEDIUM_SEGMENT,
    MIN_BLOCK,
    SMALL_REQUEST,
    SMALL_SEGMENT,
)
from memlab.units import round_up
from memlab.workloads.quantized import COMPUTE_DTYPES, assumed

# Symbol: (prime, multiplier). b sequences of s tokens; g key-value heads with m query heads each,
# of size d; h hidden size where it is not g * m * d; f feed-forward width; V vocabulary; P
# positions; r LoRA rank. The multipliers are what kernels round a dimension up to, and make every
# matrix a multiple of the 64 * 256 weights that share a scale of scales in 4 bits.
SYMBOLS = {
    "b": (29, 1),
    "s": (37, 128),
    "g": (17, 8),
    "m": (19, 1),
    "d": (5, 32),
    "h": (31, 128),
    "f": (53, 128),
    "V": (41, 64),
    "P": (43, 128),
    "r": (47, 16),
}
PRIMED = {name: prime * times for name, (prime, times) in SYMBOLS.items()}
# Not of the model: W bytes of a workspace of the card, n tensors that are trained.
ALL_SYMBOLS = (*SYMBOLS, "W", "n")
FILE = Path(__file__).parent.parent / "data" / "coefficients.jsonl.gz"
# On whose releases coefficients depend.
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
OTHERS = "the formula's coefficients are of {}; memlab.derive(recipe, gpu) makes them of those here"


class Case(NamedTuple):
    """What of the coefficients a recipe needs, and the sizes to put in."""

    pass_key: str
    update_key: str
    dimensions: dict[str, int]
    layers: int


def formula(
    recipe: Recipe, gpu: GPU | str | int | None = None, link: str | None = None
) -> Footprint:
    """The footprint of one optimizer step of `recipe`, by arithmetic alone, without a timeline.

    gpu: as for `simulate`; it decides the kernels of attention, the size of the workspaces, the
    context and the seconds.
    link: between ranks, as `simulate` has it. What a rank holds of its model is an estimate
    (`memlab.predict.closed_form_ranks`).

    Domain: models of at least 2 equal layers (in an encoder-decoder as many in both), frozen as a
    whole or not at all, trained in a way for which coefficients were derived. Sizes are free.
    With several ranks under `zero2` and `zero3` no quantized base and one stack of layers.
    Tensors are exact on one card, each in the block that the allocator would give it in a fresh
    segment, and in segments that several share as if the largest came first; what a reused block
    has over is not in it, nor what loading a quantized base leaves behind. No out-of-memory error:
    compare with `gpu.usable` yourself.

    What is reserved is a matter of order, which sums do not have, and a replay of the order takes
    a thousand times as long. So peak_reserved and device_used are None, and `reserved_range`
    holds, in bytes, peak_allocated, below which no allocator can be, and what would be reserved
    if no block were ever used again for another size, and one of the largest were split. The upper
    end is usual and no bound: several blocks may be split, and of the moments of a step only
    those are known at which a peak can be. benchmarks/formula.py counts how often it holds,
    benchmarks/border.py what fits by it and does not run.

    Coefficients that came with memlab are of certain releases of PyTorch and other libraries. Where
    others are installed, `assumptions` says so; `derive` makes them of those.

    Raises ValueError outside the domain, where the card does not have the recipe's number format,
    and where there are no coefficients; `derive` makes them.
    """
    card = find_gpu(gpu)
    for precision in (recipe.precision, recipe.compute_dtype or ""):
        require_native(precision, card.name, "bfloat16" in card.native_dtypes)
    case = read(recipe, card)
    if not known(case):
        raise ValueError(
            f"no coefficients for {recipe} on {card.name}: memlab.derive(recipe, gpu) makes them "
            "in seconds"
        )
    if link is not None:
        link_rate(card, link)  # or refuses
    return _evaluate(recipe, case, tables(case.pass_key, case.update_key), card, link)


class Tables(NamedTuple):
    """Two halves put together, as arrays.

    tensors: the term of each tensor; categories: what each is. once, each: rows are moments,
    columns tensors. phases: of the moments. parameters: rows of [term, once, each, trained].
    coefficients, powers: of the terms, a row each.
    """

    tensors: np.ndarray
    categories: list[Category]
    once: np.ndarray
    each: np.ndarray
    passes: tuple[int, int]
    phases: list[str]
    parameters: np.ndarray
    work: "_Operators"
    coefficients: np.ndarray
    powers: np.ndarray


class _Operators(NamedTuple):
    """Operators as arrays: terms by their place, -1 for none; `moved` a list for each of them.

    counts: rows of [once, each, once of each further micro-batch, each of it].
    """

    dtypes: list[str]
    dtype_of_each: list[str]
    of: np.ndarray
    flops: np.ndarray
    result: np.ndarray
    moved: np.ndarray
    mover: np.ndarray
    lists: np.ndarray
    elements: np.ndarray
    phase: np.ndarray
    recomputed: np.ndarray
    counts: np.ndarray


@functools.cache
def tables(pass_key: str, update_key: str) -> Tables:
    """The halves of a case as arrays."""
    halves = [coefficients()["halves"][key] for key in (pass_key, update_key)]
    first = len(halves[0]["tensors"])
    tensors = [one for half in halves for one in half["tensors"]]
    left, states = (
        _moment(counts, shift, len(tensors))
        for counts, shift in ((halves[0]["left"], 0), (halves[1]["states"], first))
    )
    rows, phases = [], []
    for half, beside, shift in zip(halves, (states, left + states), (0, first), strict=True):
        for moment in half["moments"]:
            rows.append(beside + _moment(moment["counts"], shift, len(tensors)))
            phases.append(moment["phase"])
    once, each = np.array(rows).transpose(1, 0, 2)
    terms = _Terms()
    return Tables(
        tensors=terms([term for _, term in tensors]),
        categories=[Category(category) for category, _ in tensors],
        once=once,
        each=each,
        passes=(len(halves[0]["moments"]), first),
        phases=phases,
        parameters=np.array([[terms([t])[0], *rest] for t, *rest in halves[0]["parameters"]]),
        work=_operators([one for half in halves for one in half["work"]], terms),
        coefficients=terms.coefficients(),
        powers=terms.powers(),
    )


class _Terms:
    """The terms that a case uses, numbered anew; -1 stays."""

    def __init__(self):
        self.used = {}

    def __call__(self, terms) -> np.ndarray:
        used = self.used
        return np.array([used.setdefault(t, len(used)) if t >= 0 else t for t in terms], int)

    def coefficients(self) -> np.ndarray:
        return np.array([coefficients()["terms"][t][0] for t in self.used], float)

    def powers(self) -> np.ndarray:
        powers = [coefficients()["terms"][t][1] for t in self.used]
        return np.array([[one.get(name, 0) for name in ALL_SYMBOLS] for one in powers])


def _moment(counts, shift: int, columns: int) -> np.ndarray:
    """Two rows: how many of each tensor in three layers, and how many more with each further."""
    row = np.zeros((2, columns))
    for tensor, once, each in counts:
        row[:, shift + tensor] = once, each
    return row


def _operators(work, terms) -> _Operators:
    dtypes = sorted({one["dtype"] for one in work if one["dtype"]})
    place = {dtype: i for i, dtype in enumerate(dtypes)} | {"": -1}
    return _Operators(
        dtypes,
        [one["dtype"] for one in work],
        np.array([place[one["dtype"]] for one in work]),
        terms([one["flops"] for one in work]),
        terms([t for one in work for t in one["result"] or (-1, -1, -1)]).reshape(-1, 3),
        terms([t for one in work for t in one["moved"]]),
        np.array([i for i, one in enumerate(work) for _ in one["moved"]], int),
        np.array([one["lists"] for one in work]),
        terms([one["elements"] for one in work]),
        np.array([PHASES.index(one["phase"]) for one in work]),
        np.array([one["recomputed"] for one in work], bool),
        np.array([one["counts"] for one in work]),
    )


def _evaluate(recipe, case: Case, table: Tables, card, link) -> Footprint:
    more = case.layers - closed_form_ranks.LAYERS
    term, once, each, trained = table.parameters.T
    numbers = once + more * each
    symbols = case.dimensions | {"W": card.workspace, "n": int(numbers @ trained)}
    values = np.array([symbols.get(name, 0) for name in ALL_SYMBOLS], float)
    terms = table.coefficients * np.prod(values**table.powers, axis=1)

    sizes = terms[table.tensors]
    elements = np.round(terms[term.astype(int)])
    counts = table.once + more * table.each
    blocks, made, divided = _blocks(sizes), 0, None
    if recipe.ranks > 1:
        weights = np.array([elements, numbers, trained])
        divided = closed_form_ranks.divide(recipe, table, sizes, more, weights, _blocks)
        # A tensor may be whole at one moment, and a rank's part of it at another.
        counts = np.hstack([divided.whole, divided.parts])
        sizes = np.concatenate([sizes, divided.sizes])
        blocks, made = _blocks(sizes), divided.sums + divided.gathered
    allocated = counts @ blocks + made
    worst = int(allocated.argmax())
    peak = int(allocated[worst]) + _rests(blocks, counts[worst])
    breakdown = dict.fromkeys(Category, 0)
    for category, size, count in zip(
        table.categories * (1 if divided is None else 2), sizes, counts[worst], strict=True
    ):
        breakdown[category] += round(count * size)
    if divided is not None:
        breakdown[Category.GRADIENTS] += round(divided.sums[worst])
        breakdown[Category.TEMPORARY] += round(divided.gathered[worst])
    breakdown[Category.ROUNDING] = peak - sum(breakdown.values())
    seconds, no_time = None, ""
    try:
        columns = _columns(table.work, terms, more, recipe.accumulation)
        if divided is not None:
            columns = _with_ranks(columns, divided)
        seconds = step_time(columns, card, recipe.batch_size * recipe.accumulation, link)
    except ValueError as error:
        no_time = str(error)
    weights = elements * numbers
    others = of_other_releases(recipe, case)
    return Footprint(
        peak_allocated=peak,
        peak_reserved=None,
        reserved_range=(peak, max(peak, _without_reuse(blocks, counts) + int(np.max(made)))),
        breakdown=breakdown,
        peak_phase=Phase(table.phases[worst]),
        context=card.context,
        parameters=round(weights.sum()),
        trainable_parameters=round(weights @ trained),
        step_time=seconds,
        no_time=no_time,
        assumptions=(*assumed(recipe), *([OTHERS.format(others)] if others else [])),
    )


def _columns(work: _Operators, terms, more: int, accumulation: int) -> Columns:
    """The operators of a step, with numbers in place of terms."""
    terms = np.append(terms, 0.0)  # the last is for what has no term
    once, each, again, each_again = work.counts.T
    times = once + more * each + (accumulation - 1) * (again + more * each_again)
    return Columns(
        work.dtypes,
        work.of,
        terms[work.flops],
        count_tiles(terms[work.result], work.dtype_of_each),
        np.bincount(work.mover, terms[work.moved], len(times)),
        count_kernels(work.lists, terms[work.elements]),
        work.phase,
        work.recomputed,
        times,
    )


def _with_ranks(columns: Columns, divided: closed_form_ranks.RankTables) -> Columns:
    """The operators of a rank: its part of the update, and a kernel for each copy and sending."""
    share = np.where(columns.phase == PHASES.index(Phase.STEP), divided.share, 1.0)
    phases, sent, copied, times = zip(*divided.traffic, strict=True)
    none = np.zeros(len(sent))
    return Columns(
        columns.dtypes,
        np.append(columns.of, none.astype(int) - 1),
        np.append(columns.flops, none),
        np.append(columns.tiles, none),
        np.append(columns.nbytes * share, copied),
        np.append(columns.kernels * share, none + 1),
        np.append(columns.phase, [PHASES.index(phase) for phase in phases]),
        np.append(columns.recomputed, none > 0),
        np.append(columns.times, times),
        np.append(np.zeros(len(columns.of)), sent),
    )


def _without_reuse(blocks, counts) -> int:
    """Bytes of the segments if every size of block had its own: the most of each, summed up.

    And one more of the largest that come and go: a smaller tensor splits the free block of one,
    and the next finds it too small.
    """
    sizes, which = np.unique(blocks, return_inverse=True)
    of_each = counts @ (which[:, None] == np.arange(len(sizes)))
    held = of_each.max(axis=0)
    small, large = sizes <= SMALL_REQUEST, sizes >= MEDIUM_REQUEST
    come_and_go = large & (of_each.min(axis=0) < held)
    reserved = round_up(int((sizes * come_and_go).max(initial=0)), LARGE_ROUND)
    for sizes_of_pool, segment in (
        (sizes * small, SMALL_SEGMENT),
        (sizes * (~small & ~large), MEDIUM_SEGMENT),
        (round_up(sizes, LARGE_ROUND) * large, LARGE_ROUND),
    ):
        reserved += round_up(int(held @ sizes_of_pool), segment)
    return reserved


def _rests(blocks, counts) -> int:
    """Bytes that are left of segments which several blocks share, and stay with the last of them.

    The allocator does not split off a rest of up to 1 MiB. In a model whose weights take 1.125 MiB
    each, that is of every segment of 20 MiB the 0.875 MiB beside 17 of them. In which order blocks
    come is not known here: the largest come first, each segment as full as they make it.
    """
    sizes, which = np.unique(blocks, return_inverse=True)
    numbers = np.bincount(which, counts).astype(int)
    shared = (sizes > SMALL_REQUEST) & (sizes < MEDIUM_REQUEST) & (numbers > 0)
    left = dict(
        zip(sizes[shared][::-1].astype(int).tolist(), numbers[shared][::-1].tolist(), strict=True)
    )
    rests = 0
    while left:
        rest, taken = MEDIUM_SEGMENT, {}
        for block, number in left.items():
            fitting = min(number, rest // block)
            if fitting:
                taken[block] = fitting
                rest -= fitting * block
        segments = min(left[block] // number for block, number in taken.items())
        if rest <= SMALL_REQUEST:
            rests += segments * rest
        left = {block: n - segments * taken.get(block, 0) for block, n in left.items()}
        left = {block: n for block, n in left.items() if n}
    return rests


def _blocks(sizes: np.ndarray) -> np.ndarray:
    """The allocator's blocks for tensors; in a segment of its own, a rest up to 1 MiB included."""
    blocks = round_up(np.ceil(sizes), MIN_BLOCK)
    segments = round_up(blocks, LARGE_ROUND)
    whole = (blocks >= MEDIUM_REQUEST) & (segments - blocks <= SMALL_REQUEST)
    return np.where(whole, segments, blocks)


@functools.cache
def coefficients() -> dict:
    """Every term and half that is known; `derive` adds to them.

    versions: library -> release, of the halves whose keys are `kept`, which came with memlab.
    """
    if not FILE.exists():
        return {"terms": [], "halves": {}, "versions": {}, "kept": set()}
    first, *lines = gzip.decompress(FILE.read_bytes()).decode().splitlines()
    halves = _Halves(zip(map(json.loads, lines[::2]), lines[1::2], strict=True))
    return json.loads(first) | {"halves": halves, "kept": set(halves)}


@functools.cache
def installed() -> dict[str, str]:
    """Library -> its release here, of those on which coefficients depend, as far as they are here.

    Builds for CUDA and for a CPU (2.13.0+cpu) are the same release.
    """
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def other_releases(versions: dict[str, str], names=LIBRARIES) -> str:
    """In which libraries kept numbers are of other releases than those here; empty for none.

    versions: library -> release, as they were kept. names: the libraries that matter.
    """
    here = installed()
    kept = {name: versions[name].partition("+")[0] for name in names if name in versions}
    return ", ".join(
        f"{name} {release} (here {here.get(name, 'none')})"
        for name, release in kept.items()
        if release != here.get(name)
    )


def of_other_releases(recipe: Recipe, case: Case) -> str:
    """Of which other releases a case's coefficients are; empty where they are of those here."""
    known, names = coefficients(), ["torch", "transformers"]
    if known["kept"].isdisjoint((case.pass_key, case.update_key)):
        return ""
    names += ["peft"] * (recipe.lora_rank > 0)
    names += ["bitsandbytes"] * (recipe.base != "none" or "8bit" in recipe.optimizer)
    return other_releases(known["versions"], names)


class _Halves(UserDict):
    """Halves by key, each read from its line when it is asked for: all together take a second."""

    def __getitem__(self, key):
        half = self.data[key]
        if isinstance(half, str):
            half = self.data[key] = json.loads(half)
        return half


# ---------------------------------------------------------------------- what a recipe says


def known(case: Case) -> bool:
    """Whether the coefficients of both halves are there."""
    return {case.pass_key, case.update_key} <= coefficients()["halves"].keys()


def read(recipe: Recipe, card: GPU = ANY_CARD) -> Case:
    """The case of a recipe on a card. Raises ValueError outside the domain."""
    if not set(recipe.freeze) <= {"embeddings", "backbone"}:
        raise ValueError(
            f"freeze holds {', '.join(map(str, recipe.freeze))}: the formula allows embeddings and "
            "backbone"
        )
    named = isinstance(recipe.model, str) and recipe.model in models.MODELS
    structure, dimensions, layers, window = (_named if named else _structure)(recipe.model)
    in_pass, _ = closed_form_ranks.alone(recipe)
    trained = trained_as(recipe)
    passed = trained | {
        "precision": in_pass.precision,
        "checkpointing": recipe.checkpointing,
        "attention": attention_of(in_pass, dimensions, card),
        "accumulated": recipe.accumulation > 1,
        "set_to_none": recipe.set_to_none,
        "padded": recipe.padded,
    }
    updated = trained | {"optimizer": recipe.optimizer, "clipped": recipe.max_grad_norm > 0}
    pass_key, update_key = (
        f"{structure} {json.dumps(way, sort_keys=True)}" for way in (passed, updated)
    )
    if window and recipe.seq_len > window:
        raise ValueError(
            f"seq_len is {recipe.seq_len}: the formula allows lengths up to the sliding window of "
            f"{recipe.model_name}, {window}"
        )
    sizes = {"b": recipe.batch_size, "s": recipe.seq_len, "r": recipe.lora_rank}
    return Case(pass_key, update_key, dimensions | sizes, layers)


def attention_of(in_pass: Recipe, dimensions: dict[str, int], card: GPU) -> str:
    """How a pass computes attention on a card: `eager`, or the kernels that sdpa takes there.

    Raises ValueError for a head size that a kernel pads, or takes otherwise than those of the
    coefficients.
    """
    if in_pass.attention == "eager":
        return "eager"
    size, shares_keys = dimensions["d"], dimensions["m"] > 1
    asked = COMPUTE_DTYPES[COMPUTED_IN[in_pass.precision]], shares_keys, card.capability
    routes = model_routes(*asked)
    if size % 8 or model_routes(*asked, size) != routes:
        raise ValueError(
            f"head size is {size}: with sdpa on {card.name} the formula allows multiples of 8 that "
            "take the kernels of smaller ones, simulate knows more"
        )
    return "sdpa: {}, with a mask {}".format(*routes)


@functools.cache
def _named(model: str):
    return _structure(model)


def _structure(model) -> tuple[str, dict[str, int], int, int | None]:
    """What is special about a config apart from sizes, as a text; its dimensions, layers, window.

    A config.json names the release that wrote it, and settings that its class does not know any
    more: neither is of the model.
    """
    config = models.config(model)
    reason = models.unlike_a_formula(config)
    if reason:
        raise ValueError(f"no formula for {config.model_type}: {reason}")
    layers = config.num_hidden_layers
    if layers < 2 or (getattr(config, "num_decoder_layers", None) or layers) != layers:
        raise ValueError(
            f"{config.model_type} with {layers} layers: the formula allows models of at least 2 "
            "layers, in a decoder as many as in the encoder"
        )
    prime, dimensions = primed(config)
    own = vars(type(config)()).keys() - {"architectures", "transformers_version"}
    kept = {}
    for name, value in vars(prime).items():
        if isinstance(value, (list, tuple)) and value and len(set(map(str, value))) == 1:
            value = value[0]  # a kind of layer, named for each of them
        if isinstance(value, float):
            value = bool(value) if "drop" in name else None
        if isinstance(value, dict):
            value = value.get("rope_type")
            value = "default" if value in SAME_ROPE else value
        hidden = name not in own or name.startswith("_") or name.endswith("token_id")
        hidden |= "layers" in name or name == "n_layer"
        if not hidden and isinstance(value, (bool, int, str)):
            kept[name] = value
    kept |= {"model_type": config.model_type}
    window = getattr(config, "sliding_window", None)
    return json.dumps(kept, sort_keys=True), dimensions, layers, window


def primed(config):
    """The config with dimensions that are distinct primes, and its real dimensions."""
    values, real, _ = at_widths(config, PRIMED)
    values["sliding_window"] = 2 * PRIMED["P"]  # wider than any sequence
    if getattr(config, "max_position_embeddings", None):
        real["P"] = config.max_position_embeddings
        values["max_position_embeddings"] = PRIMED["P"]
    return models.resized(config, **values), real
