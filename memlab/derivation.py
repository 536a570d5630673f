"""Coefficients of the closed form, from three small simulations of primed dimensions.

`memlab.simulate` runs a model whose dimensions are distinct primes (times powers of two), so that
each storage's bytes can be factored back into dimensions, with two, three and four layers, which
says what each further layer adds. Nothing is fitted.
"""

import json
from dataclasses import replace

import numpy as np

from memlab import models
from memlab.closed_form import PRIMED, SYMBOLS, coefficients, key, primed, product, tables
from memlab.footprint import Category
from memlab.gpus import ANY_CARD
from memlab.recipe import Recipe
from memlab.simulation import log_of
from memlab.trace import depth
from memlab.trace.allocator import MEDIUM_REQUEST
from memlab.trace.events import Birth, Death, Mark


def derive(recipe: Recipe) -> dict:
    """The coefficients of a recipe's family and way of training; `formula` knows them afterwards.

    Three small traces, some seconds. Raises ValueError where layers are unlike or the traces do not
    agree on what a layer adds; `simulate` can still run such a recipe.
    """
    name = key(recipe)
    prime, _ = primed(models.config(recipe.model))
    changes = {"batch_size": PRIMED["b"], "seq_len": PRIMED["s"]}
    changes["accumulation"] = min(recipe.accumulation, 2)
    if recipe.lora_rank:
        changes["lora_rank"] = PRIMED["r"]
    logs = [
        log_of(replace(recipe, model=models.with_layers(prime, number), **changes))
        for number in depth.SHALLOW
    ]
    blocks, (_, three, four), kinds = depth.agreed_growth(logs)
    if blocks is None:
        raise ValueError(f"no formula for {recipe}: its layers have no common pattern")
    tensors, moments = _moments(three, four, blocks, kinds)
    case = {"tensors": tensors, "moments": moments}
    few, many = logs[1].weights, logs[2].weights
    case["parameters"] = [
        [_factored("", elements), few[kind], many[kind] - few[kind]]
        for kind in many
        for elements in kind[:1]
    ]
    case["trainable_parameters"] = [
        term for term, kind in zip(case["parameters"], many, strict=True) if kind[1]
    ]
    coefficients()[name] = case
    tables.cache_clear()
    return case


def _factored(category: str, nbytes: int) -> list:
    """[category, coefficient, {symbol: power}] of a size in primed dimensions."""
    if category == Category.WORKSPACES and nbytes == ANY_CARD.workspace:
        return [category, 1, {"W": 1}]
    if nbytes % (PRIMED["s"] + 1) == 0:  # shifted labels are padded by one token for a moment
        nbytes = nbytes // (PRIMED["s"] + 1) * PRIMED["s"]
    powers, scale = {}, 1
    for symbol, (prime, times) in SYMBOLS.items():
        while nbytes % prime == 0:
            nbytes, scale = nbytes // prime, scale * times
            powers[symbol] = powers.get(symbol, 0) + 1
    coefficient = nbytes / scale  # exact: the multipliers are powers of two
    return [category, int(coefficient) if coefficient.is_integer() else coefficient, powers]


def _moments(three, four, blocks, kinds):
    """The tensors of a case and the moments at which a peak of allocated or reserved can be."""
    tensors, places = [], {}
    changes = np.zeros(len(kinds), int), np.zeros(len(kinds), int)  # tensor, +1 or -1
    for i, kind in enumerate(kinds):
        birth = kind.birth if type(kind) is Death else kind
        if type(birth) is Birth:
            tensor = _factored(birth.category, birth.nbytes)
            name = json.dumps(tensor)
            if name not in places:
                places[name] = len(tensors)
                tensors.append(tensor)
            changes[0][i], changes[1][i] = places[name], 1 if kind is birth else -1

    def levels(steps):
        change = np.zeros((len(steps), len(tensors)), np.int32)
        change[np.arange(len(steps)), changes[0][steps]] = changes[1][steps]
        return change.cumsum(axis=0)

    low, high = levels(three), levels(four)
    start = int(np.flatnonzero(three == kinds.index(Mark.RESET))[-1])
    pairs, shift, waiting = [], 0, list(blocks)  # (place in three, the like place in four)
    for t in range(len(three)):
        while waiting and waiting[0][0] <= t:
            place, block = waiting.pop(0)
            size = len(block)
            # The last of a stage's blocks; the others, when they differ, lie in between.
            pairs += [(place - size + u, place + shift + u) for u in range(size)]
            shift += size
        pairs.append((t, t + shift))
    pairs = [p for p in pairs if p[0] >= start and type(kinds[three[p[0]]]) is Birth]
    at, like = np.array(pairs).T
    once, each = low[at], high[like] - low[at]
    chosen = _largest(tensors, once, each)
    moments = [
        {
            "phase": str(kinds[three[at[i]]].phase),
            "counts": [
                [int(t), int(once[i, t]), int(each[i, t])]
                for t in np.flatnonzero((once[i] != 0) | (each[i] != 0))
            ],
        }
        for i in chosen
    ]
    used = sorted({t for moment in moments for t, *_ in moment["counts"]})
    renamed = {t: i for i, t in enumerate(used)}
    for moment in moments:
        moment["counts"] = [[renamed[t], *counts] for t, *counts in moment["counts"]]
    return [tensors[t] for t in used], moments


def _largest(tensors, once, each, draws=400) -> list[int]:
    """The moments that are the largest for some model: of random sizes, over a wide range.

    Of all tensors, for the peak, and of those with segments of their own, for what is reserved.
    """
    random, chosen = np.random.default_rng(0), set()
    ranges = {"b": (1, 128), "s": (16, 16384), "g": (1, 96), "m": (1, 8), "d": (32, 256)}
    ranges |= {"h": (256, 16384), "f": (512, 65536), "V": (1000, 260000)}
    ranges |= {"P": (512, 131072), "r": (1, 256), "W": (2**23, 2**25), "layers": (2, 128)}
    for _ in range(draws):
        drawn = {n: float(np.exp(random.uniform(*np.log(ends)))) for n, ends in ranges.items()}
        sizes = np.array([product(term, drawn) for term in tensors])
        counts = once + (drawn["layers"] - 3) * each
        for pool in (True, sizes >= MEDIUM_REQUEST):
            chosen.add(int((counts @ (sizes * pool)).argmax()))
    return sorted(chosen)
