"""How good are the predictions? Every record beside what the predictors say of its recipe.

Kinds of records are never mixed: what a GPU was recorded to take, what others have published of
one, and what a CPU's own kernels keep are three questions.
"""

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memlab import models
from memlab.card import fake_tensors
from memlab.evidence.loops import kept_predictions, simulate_loop
from memlab.evidence.records import Record, card_files, load, published_files
from memlab.footprint import Footprint, Phase, StepTime
from memlab.gpus import GPU, GPUS, gpu_of_device
from memlab.predict.formula import formula
from memlab.predict.progress import Progress
from memlab.predict.simulate import simulate
from memlab.spec.recipe import QUANTIZED, Recipe
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training, import_libraries


def formula_on_card(recipe: Recipe, card: GPU) -> Footprint:
    """`memlab.formula`, which knows no limit, with torch.OutOfMemoryError above the card's."""
    footprint = formula(recipe, card)
    if card.usable is not None and footprint.peak_allocated > card.usable:
        raise torch.OutOfMemoryError(f"{footprint.peak_allocated} bytes are too many")
    return footprint


# name -> prediction of a recipe on a card
Predictor = Callable[[Recipe, GPU], Footprint]
PREDICTORS: dict[str, Predictor] = {
    "simulate": simulate,
    "formula": formula_on_card,
}
# What a row may be off before it is listed: as today's kernels, and as those before PyTorch 2.
ALLOWED = {
    "tensors": 0.001,
    "allocated": 0.01,
    "active": 0.05,  # of a loop of which much is not known
    "reserved": 0.05,
    "device used": 0.05,
    "seconds": 0.4,  # of a step, an estimate
}
ALLOWED_OLD = 0.15  # of bytes
PYTORCH_2 = "2023-03-15"


@dataclass(frozen=True)
class Comparison:
    """One figure of one run, predicted and recorded.

    against: what it is compared with: the device of the run, `published` before it where it is.
    family: encoder, decoder, encoder-decoder or moe. technique: full, frozen, LoRA or QLoRA. A
        published run may say others.
    figure: `allocated`, `reserved` or `device used` (reserved and context) on a GPU, or `active`,
        which is allocated and what another stream still uses; `seconds` of a step; `tensors` on a
        CPU, where the run is predicted with the CPU's own kernels instead of CUDA's; `out of
        memory`, where the run or its prediction ended so.
    bounds: (lowest, highest) prediction of a figure that is predicted as a range, else None.
    predicted, recorded: bytes, of a predictor that gives a range alone its upper end, or seconds;
        for `out of memory` whether it did; predicted is None where `refused` says why there is
        none.
    old: whether the run is older than PyTorch 2, whose kernels are not simulated.
    """

    against: str
    name: str
    family: str
    technique: str
    predictor: str
    figure: str
    predicted: int | float | bool | None
    recorded: int | float | bool
    refused: str = ""
    bounds: tuple[float, float] | None = None
    old: bool = False

    @property
    def error(self) -> float | None:
        """Predicted over recorded, less one; None without two figures."""
        if self.predicted is None or self.figure == "out of memory":
            return None
        return self.predicted / self.recorded - 1

    @property
    def missed(self) -> bool:
        """Whether the prediction is wrong by more than is allowed, or was refused.

        Bytes that are predicted as a range may be anywhere in it.
        """
        if self.figure == "out of memory":
            return self.predicted is not self.recorded
        if self.bounds and self.figure != "seconds":
            return not self.inside
        bytes_of_old = self.old and self.figure != "seconds"
        allowed = ALLOWED_OLD if bytes_of_old else ALLOWED[self.figure]
        return self.error is None or abs(self.error) > allowed

    @property
    def inside(self) -> bool | None:
        """Whether what was recorded is inside the reported range; None without a range."""
        return self.bounds and self.bounds[0] <= self.recorded <= self.bounds[1]

    def as_dict(self) -> dict[str, Any]:
        more = {"error": self.error, "missed": self.missed, "inside": self.inside}
        return dataclasses.asdict(self) | more


def compare_records(
    runs: Iterable[Record], predictors: Mapping[str, Predictor] | None = None
) -> list[Comparison]:
    """Every run's figures beside the predictions of its recipe.

    runs: of `memlab.find_records()` or `load()`. predictors: name -> function of a recipe and a
    card; None takes `PREDICTORS`. A run with a loop of its own is predicted by that loop alone.

    A run on a device that is no card of `memlab.gpus` is refused in its row.
    """
    runs = list(runs)
    found: list[Comparison] = []
    predictors = PREDICTORS if predictors is None else predictors
    for run in Progress(runs, "predicting"):
        if run.device.startswith("CPU"):
            found += _compare(run, "simulate, CPU kernels", partial(_of_recipe, _on_cpu))
        elif run.loop:
            found += _compare(run, f"loop of {run.loop}", simulate_loop)
        else:
            for name, predict in predictors.items():
                found += _compare(run, name, partial(_of_recipe, predict))
    return found


def compare_kept(file: str, release: bool = False) -> list[Comparison]:
    """The runs of a file of `card_files` beside the predictions that are kept of them.

    release: those by a library's release of the runs, where it says something else than today's.
    """
    said = kept_predictions()["runs"][file]

    def predict(run: Record, _: GPU | None) -> Footprint:
        kept = said[run.name]
        kept = kept.get("of_release", kept) if release else kept
        if "refused" in kept:
            raise ValueError(kept["refused"])
        time = None
        if kept.get("step_seconds"):
            low, expected, high = kept["step_seconds"]
            time = StepTime(low, expected, high, parts={}, flops=0, peak_rate=0)
        return Footprint(
            kept["peak_allocated_bytes"],
            kept["peak_reserved_bytes"],
            {},
            Phase.UNKNOWN,
            reserved_range=kept["reserved_range_bytes"],
            step_time=time,
        )

    return [one for run in load(card_files()[file]) for one in _compare(run, "kept", predict)]


def compare_seconds() -> dict[str, list[Comparison]]:
    """File of published runs -> seconds of its runs beside the kept predictions."""
    found = {
        file: [one for one in compare_kept(file) if one.figure == "seconds" and not one.refused]
        for file in published_files()
    }
    return {file: timed for file, timed in found.items() if timed}


def ratio_errors(file: str) -> list[float]:
    """How far off kept ratios of seconds are in a file of published runs: predicted over real,
    less one, of all pairs of runs of one model at one length on one card, as a planner compares."""
    runs = {run.name: run for run in load(published_files()[file])}
    by_case: dict[tuple[str, str, int], list[float]] = collections.defaultdict(list)
    for one in compare_seconds().get(file, []):
        run = runs[one.name]
        assert one.predicted is not None  # it was not refused
        case = one.against, json.dumps(run.recipe["model"]), run.recipe["seq_len"]
        by_case[case].append(one.predicted / one.recorded)
    pairs = (pair for errors in by_case.values() for pair in itertools.combinations(errors, 2))
    return [one / other - 1 for one, other in pairs]


def _of_recipe(
    predict: Callable[[Recipe, Any], Footprint], run: Record, card: GPU | None
) -> Footprint:
    return predict(Recipe(**run.recipe), card)


def _on_cpu(recipe: Recipe, _: GPU | None) -> Footprint:
    return simulate_on_cpu(recipe)


def _compare(
    run: Record, predictor: str, predict: Callable[[Record, Any], Footprint]
) -> list[Comparison]:
    """The figures of a run beside `predict(run, card)`; card: None of a run on a CPU."""
    against = f"published, {run.device}" if run.kind == "published" else run.device
    begin = against, run.name, *group_of(run), predictor
    ran_out = bool(run.figures.get("out_of_memory"))
    card = _card(run)
    try:
        if card is None and not run.device.startswith("CPU"):
            raise ValueError(f"{run.device} is none of the cards {', '.join(GPUS)}")
        footprint = predict(run, card)
    except torch.OutOfMemoryError:
        return [Comparison(*begin, "out of memory", True, ran_out)]
    except (ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        recorded = {"out of memory": ran_out} if ran_out else _recorded(run)
        return [Comparison(*begin, name, None, value, why) for name, value in recorded.items()]
    if ran_out:
        return [Comparison(*begin, "out of memory", False, True)]
    drawn = footprint.reserved_range
    if footprint.peak_reserved is None and drawn:
        footprint = dataclasses.replace(footprint, peak_reserved=drawn[1])
    predicted = _predicted(run, footprint, card)
    found = []
    for name, value in _recorded(run).items():
        bounds: tuple[float, float] | None = None
        if drawn and name in ("reserved", "device used"):
            beside = predicted[name] - predicted["reserved"]
            bounds = drawn[0] + beside, drawn[1] + beside
        if name == "seconds":
            if footprint.step_time is None:
                continue
            bounds = footprint.step_time.low, footprint.step_time.high
        old = run.date < PYTORCH_2
        found.append(Comparison(*begin, name, predicted[name], value, "", bounds, old))
    return found


def _card(run: Record) -> GPU | None:
    """The card of a run, with the memory that this one had, where the run says so."""
    card = gpu_of_device(run.device)
    total = run.figures.get("total_memory_bytes")
    return dataclasses.replace(card, total_memory=total) if card and total else card


def _recorded(run: Record) -> dict[str, float]:
    names = {
        "tensors": "peak_tensors_bytes",
        "allocated": "peak_allocated_bytes",
        "active": "peak_active_bytes",
        "reserved": "peak_reserved_bytes",
        "device used": "device_used_bytes",
    }
    found = {name: run.figures[key] for name, key in names.items() if key in run.figures}
    if "samples_per_second" in run.figures and not run.device.startswith("CPU"):
        samples = run.recipe["batch_size"] * run.recipe.get("accumulation", 1)
        found["seconds"] = samples / run.figures["samples_per_second"]
    if "step_seconds" in run.figures and not run.device.startswith("CPU"):
        found["seconds"] = run.figures["step_seconds"]
    return found


def _predicted(run: Record, footprint: Footprint, card: GPU | None) -> dict[str, float]:
    if card is None:
        return {"tensors": footprint.peak_tensors}
    # A published run brings its context: those of older drivers are no card's of today.
    context = run.figures.get("context_bytes") if run.kind == "published" else None
    assert footprint.peak_reserved is not None and card.context is not None  # of a named card
    found: dict[str, float] = {
        "tensors": footprint.peak_tensors,
        "allocated": footprint.peak_allocated,
        "active": footprint.peak_allocated,
        "reserved": footprint.peak_reserved,
        "device used": footprint.peak_reserved + (card.context if context is None else context),
    }
    if footprint.step_time:
        found["seconds"] = footprint.step_time.expected
    return found


def simulate_on_cpu(recipe: Recipe) -> Footprint:
    """The second step on fake tensors with the CPU's own kernels: tensors only, no allocator.

    None of CUDA's rules is in it, so a measured run on a CPU must give the same bytes. That tests
    the fake tensors, the tracer and the loop, and says nothing of a GPU.
    """
    import_libraries(recipe)
    with fake_tensors.tensors_without_data(), Tracer() as tracer:
        training = Training(recipe)
        tracer.watch(training.model, inputs=training.inputs)
        training.step()
        tracer.reset_peak()
        training.step()
        return tracer.footprint()


def group_of(run: Record) -> tuple[str, str]:
    """(family, technique) of a run, as it says or by its recipe."""
    said = run.settings
    if "technique" in said:
        return said["family"], said["technique"]
    recipe = Recipe(**run.recipe)
    return family(recipe), technique(recipe)


def family(recipe: Recipe) -> str:
    """encoder, decoder, encoder-decoder or moe."""
    if models.has_experts(recipe.model):
        return "moe"
    by_task = {"sequence-classification": "encoder", "seq2seq-lm": "encoder-decoder"}
    return by_task.get(models.default_task(recipe.model), "decoder")


def technique(recipe: Recipe) -> str:
    """full, frozen, LoRA or QLoRA."""
    if recipe.base in QUANTIZED:
        return "QLoRA"
    return "LoRA" if recipe.lora_rank else "frozen" if recipe.freeze else "full"
