"""Coefficients of the closed form, from small simulations of primed dimensions.

`memlab.simulate` runs a model whose dimensions are distinct primes (times powers of two), so that
each storage's bytes can be factored back into dimensions, with two, three and four layers, which
says what each further layer adds. Nothing is fitted.
"""

from dataclasses import replace

import numpy as np
import torch

from memlab import models
from memlab.footprint import Category, Phase
from memlab.gpus import ANY_CARD, GPU, find_gpu
from memlab.predict.closed_form import (
    ALL_SYMBOLS,
    PRIMED,
    SYMBOLS,
    coefficients,
    of_other_releases,
    primed,
    read,
    tables,
)
from memlab.predict.closed_form_ranks import LAYERS, alone
from memlab.predict.run import built, shallow_log
from memlab.spec.recipe import Recipe
from memlab.trace.allocator import MEDIUM_REQUEST
from memlab.trace.events import Alloc, Free, Marker
from memlab.trace.layered import Counts, LayeredLog
from memlab.workloads.training import Training

# A size is a product of dimensions if what is left of it is a small number; kernels' own scratch
# does not know the dimensions.
LARGEST_COEFFICIENT, LARGEST_CONSTANT = 2**10, 2**22


def derive(recipe: Recipe, gpu: GPU | str | int | None = None) -> None:
    """Make the coefficients of a recipe's family and way of training; `formula` knows them then.

    gpu: as for `formula`; they hold for all cards that compute attention with the same kernels.

    Three small traces for each half that is not there yet, or is there of other releases of
    PyTorch and other libraries than are installed; a second or two; of one card, whatever
    the ranks. Raises ValueError where
    layers are unlike, where the traces do not agree on what a layer adds, and where a large tensor
    is no product of dimensions; `simulate` can still run such a recipe.
    """
    card = find_gpu(gpu)
    case, halves = read(recipe, card), coefficients()["halves"]
    passed, updated = alone(recipe)
    if of_other_releases(recipe, case):
        for key in (case.pass_key, case.update_key):
            coefficients()["kept"].discard(key)
            halves.pop(key, None)
    # Of the card only what decides kernels; sizes and rates come later.
    like = replace(ANY_CARD, capability=min(card.capability, ANY_CARD.capability))
    if case.pass_key not in halves:
        # Whatever the optimizer, it does not step.
        bare = passed.but(optimizer="sgd", max_grad_norm=0.0)
        halves[case.pass_key] = _half(bare, only_pass, like)
    if case.update_key not in halves:
        bare = updated.but(accumulation=1, set_to_none=True)
        halves[case.update_key] = _half(bare, only_update, like)
    tables.cache_clear()


def adopt(others: dict) -> None:
    """Add the halves of other coefficients to those that are known, with their terms."""
    here = [_place(*term) for term in others["terms"]]

    def moved(term):
        return here[term] if term >= 0 else term

    for key, half in others["halves"].items():
        tensors = [[category, moved(term)] for category, term in half["tensors"]]
        parameters = [[moved(term), *rest] for term, *rest in half["parameters"]]
        work = [
            one
            | {name: moved(one[name]) for name in ("flops", "elements")}
            | {name: [moved(term) for term in one[name]] for name in ("result", "moved")}
            for one in half["work"]
        ]
        terms = {"tensors": tensors, "work": work, "parameters": parameters}
        coefficients()["halves"].setdefault(key, half | terms)
    tables.cache_clear()


def only_pass(recipe: Recipe, simulated) -> Training:
    """Two passes over a step's micro-batches without an update; the second is counted."""
    training = built(recipe, simulated)
    for _ in range(2):
        simulated.tracer.work.end_step()
        simulated.reset_peak()
        training.optimizer.zero_grad(recipe.set_to_none)
        training.losses = training.make_gradients()  # they live as long as the step
    simulated.tracer.work.end_step()
    return training


def only_update(recipe: Recipe, simulated) -> Training:
    """Two updates of gradients that come from nowhere; the second is counted."""
    training = built(recipe, simulated)
    training.scaler.scale(training.inputs[0].new_ones((), dtype=torch.float32))
    for _ in range(2):
        for parameter in training.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        simulated.reset_peak()
        training.update()
    return training


def _half(recipe: Recipe, loop, card: GPU) -> dict:
    """The coefficients of what a loop does on a card."""
    prime, _ = primed(models.config(recipe.model))
    changes = {"batch_size": PRIMED["b"], "seq_len": PRIMED["s"]}
    changes["accumulation"] = min(recipe.accumulation, 2)
    if recipe.lora_rank:
        changes["lora_rank"] = PRIMED["r"]
    logs = [
        shallow_log(
            replace(recipe, model=models.with_layers(prime, number), **changes), card, loop=loop
        )
        for number in (LAYERS - 1, LAYERS, LAYERS + 1)
    ]
    log = LayeredLog.of(logs, LAYERS)
    if log is None:
        raise ValueError(f"no formula for {recipe}: its layers have no common pattern")
    half = _moments(log, loop is only_update)
    half["work"] = _operators(log.work)
    half["parameters"] = [
        [_term(elements), *counts, free] for (elements, free), counts in log.weights.items()
    ]
    return half


def _term(number: int) -> int:
    """The place of a number among the terms, as a product of primed dimensions; -1 of 0."""
    if not number:
        return -1
    if number < 0:  # of each tensor that is trained, in place of a sum
        return _place(-number, {"n": 1})
    left = number
    for shifted in (PRIMED["s"] + 1, PRIMED["s"] - 1):  # labels, and a decoder's inputs from them
        if left % shifted == 0:
            left = left // shifted * PRIMED["s"]
    powers, scale = {}, 1
    for symbol, (prime, times) in SYMBOLS.items():
        while left % prime == 0:
            left, scale = left // prime, scale * times
            powers[symbol] = powers.get(symbol, 0) + 1
    coefficient = left / scale  # exact: the multipliers are powers of two
    if (
        powers
        and coefficient > LARGEST_COEFFICIENT
        or not powers
        and coefficient > LARGEST_CONSTANT
    ):
        raise ValueError(f"no formula: a size of {number} is no product of dimensions")
    return _place(int(coefficient) if coefficient.is_integer() else coefficient, powers)


def _term_of_operations(number: int) -> int:
    """As `_term`, of the operations of a product: a factor 5 of theirs is no further head size.

    They are a whole number of times the product of its dimensions, where a size in bytes need not
    be: a scale stands for 64 weights.
    """
    place = _term(number)
    if place < 0:
        return place
    coefficient, powers = coefficients()["terms"][place]
    while not float(coefficient).is_integer() and powers.get("d"):
        coefficient *= PRIMED["d"]
        powers = powers | {"d": powers["d"] - 1}
    return _place(int(coefficient), {name: power for name, power in powers.items() if power})


def _place(coefficient, powers) -> int:
    """The place of a term, which is added if it is new."""
    known = coefficients()
    # Where each term is, kept beside them: going through thousands for each size takes seconds.
    if "places" not in known:
        known["places"] = {_name(*term): i for i, term in enumerate(known["terms"])}
    places, name = known["places"], _name(coefficient, powers)
    if name not in places:
        places[name] = len(known["terms"])
        known["terms"].append([coefficient, powers])
    return places[name]


def _name(coefficient, powers) -> tuple:
    return coefficient, *sorted(powers.items())


def _bytes_term(category, nbytes) -> int:
    if category == Category.WORKSPACES and nbytes == ANY_CARD.workspace:
        return _place(1, {"W": 1})
    return _term(nbytes)


def _operators(work: Counts) -> list[dict]:
    """The operators of a step by terms, and how often each runs."""
    alike: dict = {}
    for one, (once, each) in work.items():
        bare = one._replace(micro_batch=0)
        counts = alike.setdefault(bare, [0, 0, 0, 0])
        further = 2 if one.micro_batch == 1 and one.phase != Phase.STEP else 0
        counts[further] += once
        counts[further + 1] += each
    return [
        {
            "dtype": one.dtype,
            "flops": _term_of_operations(one.flops),
            "result": [_term(n) for n in one.result],
            "moved": [_term(n) for n in one.moved],
            "lists": one.lists,
            "elements": _term(one.elements),
            "phase": str(one.phase),
            "recomputed": one.recomputed,
            "counts": counts,
        }
        for one, counts in alike.items()
    ]


def _moments(log: LayeredLog, update: bool) -> dict:
    """The tensors of a half and the moments at which a peak of allocated or reserved can be.

    update: whether the moments count what is there beyond what was there at the start.
    """
    kinds, three, four = list(log.kinds), log.order, log.order_at(LAYERS + 1)
    tensors, places = [], {}
    changes = np.zeros(len(kinds), int), np.zeros(len(kinds), int)  # tensor, +1 or -1
    for i, kind in enumerate(kinds):
        birth = kind.birth if type(kind) is Free else kind
        if type(birth) is Alloc:
            tensor = str(birth.category), _bytes_term(birth.category, birth.nbytes)
            if tensor not in places:
                places[tensor] = len(tensors)
                tensors.append(tensor)
            changes[0][i], changes[1][i] = places[tensor], 1 if kind is birth else -1

    def levels(steps):
        change = np.zeros((len(steps), len(tensors)), np.int32)
        change[np.arange(len(steps)), changes[0][steps]] = changes[1][steps]
        return change.cumsum(axis=0)

    low, high = levels(three), levels(four)
    reset = kinds.index(Marker.RESET)
    start, start_of_four = (int(np.flatnonzero(steps == reset)[-1]) for steps in (three, four))
    states = np.array([category == Category.OPTIMIZER_STATES for category, _ in tensors])
    before = low[start] * states, high[start_of_four] * states
    left = low[-1], high[-1]
    if update:
        low, high = low - low[start], high - high[start_of_four]
    pairs, shift, waiting = [], 0, list(log.blocks)  # (place in three, the like place in four)
    for t in range(len(three)):
        while waiting and waiting[0][0] <= t:
            place, block = waiting.pop(0)
            size = len(block)
            # The last of a stage's blocks; the others, when they differ, lie in between.
            pairs += [(place - size + u, place + shift + u) for u in range(size)]
            shift += size
        pairs.append((t, t + shift))
    born = [p for p in pairs if p[0] > start and type(kinds[three[p[0]]]) is Alloc]
    pairs = [(start, start_of_four), *born]
    at, like = np.array(pairs).T
    once, each = low[at], high[like] - low[at]
    names = [coefficients()["terms"][term] for _, term in tensors]
    chosen = _largest(names, once, each)
    phases = [Phase.STEP if update else Phase.FORWARD] + [kinds[i].phase for i in three[at[1:]]]
    half = {
        "tensors": [list(tensor) for tensor in tensors],
        "moments": [{"phase": str(phases[i]), "counts": _counts(once[i], each[i])} for i in chosen],
    }
    if update:
        half["states"] = _counts(before[0], before[1] - before[0])
    else:
        half["left"] = _counts(left[0], left[1] - left[0])
    return _without_unused(half)


def _counts(once, each) -> list[list[int]]:
    there = np.flatnonzero((once != 0) | (each != 0))
    return [[int(t), int(once[t]), int(each[t])] for t in there]


def _without_unused(half: dict) -> dict:
    """The half without tensors that no list names."""
    lists = [moment["counts"] for moment in half["moments"]]
    lists += [half[name] for name in ("states", "left") if name in half]
    used = sorted({t for counts in lists for t, *_ in counts})
    renamed = {t: i for i, t in enumerate(used)}
    for counts in lists:
        counts[:] = [[renamed[t], *rest] for t, *rest in counts]
    return half | {"tensors": [half["tensors"][t] for t in used]}


def _largest(terms, once, each, draws=400) -> list[int]:
    """The moments that are the largest for some model: of random sizes, over a wide range.

    Of all tensors, for the peak, and of those with segments of their own, for what is reserved.
    """
    random, chosen = np.random.default_rng(0), set()
    ranges = {"b": (1, 128), "s": (16, 16384), "g": (1, 96), "m": (1, 8), "d": (32, 256)}
    ranges |= {"h": (256, 16384), "f": (512, 65536), "V": (1000, 260000), "n": (10, 1000)}
    ranges |= {"P": (512, 131072), "r": (1, 256), "W": (2**23, 2**25), "layers": (2, 128)}
    values = np.array([coefficient for coefficient, _ in terms], float)
    powers = np.array([[one.get(name, 0) for name in ALL_SYMBOLS] for _, one in terms])
    for _ in range(draws):
        drawn = {n: float(np.exp(random.uniform(*np.log(ends)))) for n, ends in ranges.items()}
        sizes = values * np.prod(np.array([drawn[n] for n in ALL_SYMBOLS]) ** powers, axis=1)
        counts = once + (drawn["layers"] - 3) * each
        for pool in (True, sizes >= MEDIUM_REQUEST):
            chosen.add(int((counts @ (sizes * pool)).argmax()))
    return sorted(chosen)
