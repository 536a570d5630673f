"""How good are the predictions? Every record beside what the predictors say of its recipe.

Kinds of records are never mixed: what a GPU was recorded to take, what others have published, and
what a CPU's own kernels keep are three questions, and a summary answers one of them at a time.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

from memlab import models
from memlab.card import fake_tensors
from memlab.closed_form import formula
from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU, GPUS, gpu_of_device
from memlab.recipe import Recipe
from memlab.simulation import simulate
from memlab.trace.tracer import Tracer
from memlab.training import Training, import_libraries
from memlab.units import mib


def formula_on_card(recipe: Recipe, card: GPU) -> Footprint:
    """`memlab.formula`, which knows no limit, with torch.OutOfMemoryError above the card's."""
    footprint = formula(recipe, card)
    if footprint.peak_allocated > card.usable:
        raise torch.OutOfMemoryError(f"{footprint.peak_allocated} bytes are too many")
    return footprint


# name -> prediction of a recipe on a card
PREDICTORS: dict[str, Callable[[Recipe, GPU], Footprint]] = {
    "simulate": simulate,
    "formula": formula_on_card,
}
# What a row may be off before it is listed: as today's kernels, on the card, and where a document
# of another time is all there is.
ALLOWED = {"tensors": 0.001, "allocated": 0.01, "reserved": 0.05, "device used": 0.05}
ALLOWED_PUBLISHED = 0.15


@dataclass(frozen=True)
class Comparison:
    """One figure of one run, predicted and recorded.

    against: what it is compared with: `published`, or the device of the recorded run.
    family: encoder, decoder, encoder-decoder or moe. technique: full, frozen, LoRA or QLoRA.
    figure: `allocated`, `reserved` or `device used` (reserved and context) on a GPU; `tensors` on
        a CPU, where the run is predicted with the CPU's own kernels instead of CUDA's;
        `out of memory`, where the run or its prediction ended so.
    bounds: (lowest, highest) prediction of a figure that is predicted as a range, else None.
    predicted, recorded: bytes, of a predictor that gives a range alone its upper end; for
        `out of memory` whether it did; predicted is None where `refused` says why there is none.
    """

    against: str
    name: str
    family: str
    technique: str
    predictor: str
    figure: str
    predicted: int | bool | None
    recorded: int | bool
    refused: str = ""
    bounds: tuple[int, int] | None = None

    @property
    def error(self) -> float | None:
        """Predicted over recorded, less one; None without two figures in bytes."""
        if self.predicted is None or self.figure == "out of memory":
            return None
        return self.predicted / self.recorded - 1

    @property
    def missed(self) -> bool:
        """Whether the prediction is wrong by more than is allowed, or was refused.

        A figure that is predicted as a range may be anywhere in it.
        """
        if self.figure == "out of memory":
            return self.predicted is not self.recorded
        if self.bounds:
            return not self.inside
        allowed = ALLOWED_PUBLISHED if self.against == "published" else ALLOWED[self.figure]
        return self.error is None or abs(self.error) > allowed

    @property
    def inside(self) -> bool | None:
        """Whether what was recorded is inside the reported range; None without a range."""
        return self.bounds and self.bounds[0] <= self.recorded <= self.bounds[1]

    def as_dict(self) -> dict:
        more = {"error": self.error, "missed": self.missed, "inside": self.inside}
        return dataclasses.asdict(self) | more


def compare_records(runs: Iterable[Record], predictors=None) -> list[Comparison]:
    """Every run's figures beside the predictions of its recipe.

    runs: of `memlab.records.records()` or `load()`. predictors: name -> function of a recipe and a
    card; None takes `PREDICTORS`.

    A run on a device that is no card of `memlab.gpus` is refused in its row.
    """
    runs, found = list(runs), []
    predictors = PREDICTORS if predictors is None else predictors
    for run in tqdm(runs, "predicting", leave=False):
        if run.device.startswith("CPU"):
            found += _compare(run, "simulate, CPU kernels", lambda r, _: simulate_on_cpu(r))
        else:
            for name, predict in predictors.items():
                found += _compare(run, name, predict)
    return found


def _compare(run: Record, predictor: str, predict) -> list[Comparison]:
    recipe = Recipe(**run.recipe)
    against = "published" if run.kind == "published" else run.device
    begin = against, run.name, family(recipe), technique(recipe), predictor
    ran_out = bool(run.figures.get("out_of_memory"))
    card = _card(run)
    try:
        if card is None and not run.device.startswith("CPU"):
            raise ValueError(f"{run.device} is none of the cards {', '.join(GPUS)}")
        footprint = predict(recipe, card)
    except torch.OutOfMemoryError:
        return [Comparison(*begin, "out of memory", True, ran_out)]
    except (ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        recorded = {"out of memory": ran_out} if ran_out else _recorded(run)
        return [Comparison(*begin, name, None, value, why) for name, value in recorded.items()]
    if ran_out:
        return [Comparison(*begin, "out of memory", False, True)]
    low, high = footprint.reserved_range or (None, None)
    if footprint.peak_reserved is None:
        footprint = dataclasses.replace(footprint, peak_reserved=high)
    predicted = _predicted(run, footprint, card)
    found = []
    for name, value in _recorded(run).items():
        bounds = None
        if high and name in ("reserved", "device used"):
            beside = predicted[name] - footprint.peak_reserved
            bounds = low + beside, high + beside
        found.append(Comparison(*begin, name, predicted[name], value, bounds=bounds))
    return found


def _card(run: Record) -> GPU | None:
    """The card of a run, with the memory that this one had, where the run says so."""
    card = gpu_of_device(run.device)
    total = run.figures.get("total_memory_bytes")
    return dataclasses.replace(card, total_memory=total) if card and total else card


def _recorded(run: Record) -> dict[str, int]:
    names = {
        "tensors": "peak_tensors_bytes",
        "allocated": "peak_allocated_bytes",
        "reserved": "peak_reserved_bytes",
        "device used": "device_used_bytes",
    }
    return {name: run.figures[key] for name, key in names.items() if key in run.figures}


def _predicted(run: Record, footprint: Footprint, card: GPU | None) -> dict[str, int]:
    if card is None:
        return {"tensors": footprint.peak_tensors}
    # A published run brings its context: those of older drivers are no card's of today.
    context = run.figures.get("context_bytes") if run.kind == "published" else None
    return {
        "tensors": footprint.peak_tensors,
        "allocated": footprint.peak_allocated,
        "reserved": footprint.peak_reserved,
        "device used": footprint.peak_reserved + (card.context if context is None else context),
    }


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


def family(recipe: Recipe) -> str:
    """encoder, decoder, encoder-decoder or moe."""
    config = models.config(recipe.model)
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        return "moe"
    by_task = {"sequence-classification": "encoder", "seq2seq-lm": "encoder-decoder"}
    return by_task.get(models.default_task(config), "decoder")


def technique(recipe: Recipe) -> str:
    """full, frozen, LoRA or QLoRA."""
    if recipe.base != "none":
        return "QLoRA"
    return "LoRA" if recipe.lora_rank else "frozen" if recipe.freeze else "full"


def summary(comparisons: Iterable[Comparison]) -> list[dict]:
    """The errors of all, of each family and of each technique, by kind, predictor and figure.

    A list of dictionaries: against, predictor, figure, group, runs, refused, and of the errors'
    sizes median and p95, of the errors worst_over and worst_under (both 0 if there is none).
    """
    groups = {}
    for one in comparisons:
        if one.figure != "out of memory":
            for group in ("all", one.family, one.technique):
                key = one.against, one.predictor, one.figure, group
                groups.setdefault(key, []).append(one)
    rows = []
    for key, members in groups.items():
        row = dict(zip(("against", "predictor", "figure", "group"), key, strict=True))
        errors = [one.error for one in members if one.error is not None]
        row |= {"runs": len(members), "refused": len(members) - len(errors)}
        if errors:
            row["median"] = float(np.median(np.abs(errors)))
            row["p95"] = float(np.percentile(np.abs(errors), 95))
            row["worst_over"] = max(0.0, *errors)
            row["worst_under"] = min(0.0, *errors)
        rows.append(row)
    return rows


NO_GPU = (
    "No GPU has been recorded yet: the grid has run on a CPU only, as tiny twins. `memlab record` "
    "on a machine with a card makes the record."
)


def report(comparisons: list[Comparison], runs: Iterable[Record]) -> str:
    """The summary and the rows that miss, as text."""
    lines = []
    if not any(run.kind == "recorded" and not run.device.startswith("CPU") for run in runs):
        lines.append(NO_GPU)
    heading = None
    for row in summary(comparisons):
        if (row["against"], row["predictor"]) != heading:
            heading = row["against"], row["predictor"]
            lines.append(f"\n{row['predictor']}, against {row['against']}")
            lines.append(f"  {'':<28}runs  refused   median      p95  worst over  worst under")
        numbers = f"  {row['figure']:<12}{row['group']:<16}{row['runs']:>4}{row['refused']:>9}"
        if "median" in row:
            numbers += f"{row['median']:>9.3%}{row['p95']:>9.3%}"
            numbers += f"{row['worst_over']:>+12.3%}{row['worst_under']:>+13.3%}"
        lines.append(numbers)
    ran_out = [one for one in comparisons if one.figure == "out of memory"]
    if ran_out:
        right = sum(not one.missed for one in ran_out)
        lines.append(f"\nout of memory: {right} of {len(ran_out)} as recorded")
    ranges = [one.inside for one in comparisons if one.bounds]
    if ranges:
        lines.append(f"\ninside the reported range: {sum(ranges)} of {len(ranges)} figures")
    missed = [one for one in comparisons if one.missed]
    lines.append(f"\n{len(missed)} figures miss what is allowed" + ":" * bool(missed))
    lines += [f"  {_miss(one)}" for one in missed]
    return "\n".join(lines).strip()


def _miss(one: Comparison) -> str:
    place = f"{one.against}, {one.name}, {one.predictor}: "
    if one.refused:
        return f"{place}refused: {one.refused}"
    if one.figure == "out of memory":
        ends = {True: "out of memory", False: "a fit"}
        return f"{place}{ends[one.predicted]} was predicted, {ends[one.recorded]} recorded"
    predicted, recorded = mib(one.predicted), mib(one.recorded)
    if one.bounds:
        predicted = " to ".join(map(mib, one.bounds))
    return f"{place}{one.figure} {predicted} against {recorded}, {one.error:+.2%}"
