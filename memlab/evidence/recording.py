"""Measure the grid of recipes on this machine, for `memlab record`.

Each run has a process of its own, and its record is written as soon as it ends. A new start goes on
where the last one was stopped.
"""

import contextlib
import datetime
import functools
import json
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from memlab.card import fake_tensors
from memlab.evidence.grid import grid_runs
from memlab.evidence.records import FOLDER, Record, load, save
from memlab.evidence.worker import about, ask
from memlab.fields import integer_from
from memlab.predict.measure import pick_device, versions
from memlab.spec.optimizers import OPTIMIZERS
from memlab.spec.recipe import Recipe
from memlab.units import mib
from memlab.workloads.training import Training, import_libraries


@dataclass
class Report:
    """What became of the runs of a grid: names, or name -> reason in one line.

    path: the file with the records.
    device: the name of the GPU or CPU.
    kept: runs with a record from before.
    done: runs made now; `out_of_memory` are some of them.
    skipped: cannot run on this machine.
    failed: ended with an error or ran beyond their time.
    left: not begun, or stopped, because the time for all runs was up.
    """

    path: Path
    device: str
    kept: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    out_of_memory: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.device}: {len(self.done)} run in {self.seconds:,.0f} s"]
        lines[0] += f" ({len(self.out_of_memory)} out of memory), {len(self.kept)} kept"
        lines += [f"skipped  {name}: {why}" for name, why in self.skipped.items()]
        lines += [f"failed   {name}: {why}" for name, why in self.failed.items()]
        if self.left:
            lines.append(f"{len(self.left)} left when the time was up; start again to continue")
        return "\n".join([*lines, f"records: {self.path}"])


def record(
    device: torch.device | str | None = None,
    out: Path | str = FOLDER,
    runs: dict[str, Recipe] | None = None,
    limit_seconds: float = float("inf"),
    run_seconds: float = 300.0,
    steps: int = 3,
    note: str = "",
) -> Report:
    """Measure every run of the grid that `out` has no record of yet, and save each at once.

    device: `cuda` or `cpu`; None takes CUDA if there is one. A CPU runs the tiny twins.
    out: folder for the records, with one file per device.
    runs: name -> recipe; None takes `grid_runs()`.
    limit_seconds: for all runs together. The run in progress is then stopped and not saved.
    run_seconds: for one run.
    steps: timed steps of each run, after the warm-up of `measure`.
    note: a remark on the machine, saved in the source of each record.

    Each run has a process of its own, which ends with this one. Running out of memory is a result
    and is recorded. Runs that the device cannot do are skipped, and the report says why.

    Raises ValueError for a file in `out` that is not whole, and OSError if `out` cannot be written.
    Both come before anything runs.
    """
    integer_from(1)("steps", steps)
    Path(out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):  # raises OSError if the folder cannot be written
        pass
    started, device = time.monotonic(), pick_device(device)  # raises ValueError for an absent one
    runs = grid_runs(tiny=device.type == "cpu") if runs is None else runs
    here = machine(device)  # asked once: it is the same for all runs
    report = Report(file_of(here["device_name"], out), here["device_name"])
    report.kept = _finished(report.path, runs)
    todo = [name for name in runs if name not in report.kept]
    bar = tqdm(total=len(runs), initial=len(report.kept), desc=report.device, unit="run")
    try:
        for name in todo:
            bar.set_postfix_str(name)
            why = cannot_fit(runs[name], here["total_memory"])
            remaining = limit_seconds - (time.monotonic() - started)
            if why:
                report.skipped[name] = why
            elif remaining <= 0:
                report.left.append(name)
            else:
                order = {"device": str(device), "recipe": runs[name].as_dict(), "steps": steps}
                answer = ask(order, min(run_seconds, remaining))
                # Stopped by the limit of all runs, and not by its own: not a failure.
                if answer.get("stopped") and remaining < run_seconds:
                    report.left.append(name)
                else:
                    _enter(report, here, name, runs[name], answer, note)
            bar.update()
    finally:
        bar.close()
        report.seconds = time.monotonic() - started
    return report


def _finished(path: Path, runs: dict[str, Recipe]) -> list[str]:
    """The names of the runs that a file has a record of, with the same recipe."""
    recorded = {}
    for run in _load(path):
        with contextlib.suppress(TypeError):  # the recipe has a field that memlab does not know
            recorded[run.name] = Recipe(**run.recipe)
    return [name for name in runs if recorded.get(name) == runs[name]]


def file_of(device_name: str, folder: Path | str = FOLDER) -> Path:
    """The path of the file with a device's records."""
    return Path(folder) / f"{re.sub('[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def machine(device: torch.device) -> dict:
    """Name, memory, driver and versions of this machine, as `memlab.evidence.worker.about`.

    CUDA is asked in another process, because a CUDA context in this one would take GPU memory from
    the runs. Raises OSError if that process fails.
    """
    if device.type == "cpu":
        return about({"device": "cpu"})
    here = ask({"device": str(device)}, 120.0)
    if "failed" in here:
        raise OSError(f"{device} cannot be identified: {here['failed']}")
    return here


def _enter(report: Report, here: dict, name: str, recipe: Recipe, answer: dict, note: str) -> None:
    """Enter one run's answer into the report, and its figures into the file of records."""
    if "refused" in answer:
        report.skipped[name] = answer["refused"]
    elif "figures" not in answer:
        report.failed[name] = answer["failed"]
    else:
        if here["total_memory"]:
            answer["figures"]["total_memory_bytes"] = here["total_memory"]
        run = Record(
            kind="recorded",
            name=name,
            recipe=json.loads(json.dumps(recipe.as_dict())),  # tuples become lists, as in a file
            figures=answer["figures"],
            device=here["device_name"],
            driver=here["driver"],
            versions=here["versions"],
            date=datetime.date.today().isoformat(),
            source=f"{_source()}; {note}" if note else _source(),
        )
        # Read the file again: another process may run the same grid, and its records must stay.
        save(report.path, [*(old for old in _load(report.path) if old.name != name), run])
        report.done.append(name)
        if "out_of_memory" in answer["figures"]:
            report.out_of_memory.append(name)


def _load(path: Path) -> list[Record]:
    return load(path) if path.exists() else []


@functools.cache
def _source() -> str:
    """The commit of memlab, or its version if it is not in a git repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        out = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        return f"commit {out}"
    except (OSError, subprocess.CalledProcessError):
        return f"memlab {versions()['memlab']}"


def cannot_fit(recipe: Recipe, total_memory: int | None) -> str:
    """Why a recipe cannot fit into `total_memory` bytes, in one line; empty if it may.

    The optimizer step has all weights, gradients and optimizer states on the GPU. If these alone
    are larger than the GPU, the run is not worth the minute that it takes to fail.
    """
    if total_memory is None:
        return ""
    try:
        least = least_bytes(recipe)
    except ValueError:
        return ""  # the recipe is invalid: the run itself reports why
    if least <= total_memory:
        return ""
    return (
        f"weights, gradients and states alone take {mib(least)}, the card has {mib(total_memory)}"
    )


def least_bytes(recipe: Recipe) -> int:
    """Bytes of weights, gradients and optimizer states, a lower bound of a run's peak.

    The model is built from tensors without data. Not counted are gradients with `step_in_backward`,
    which frees each at once, and gradients and states with `optimizer_offload`.
    """
    import_libraries(recipe)
    with fake_tensors.tensors_without_data():
        built_in = fake_tensors.without_draws()
        training = Training(recipe.but(batch_size=1, accumulation=1), built_in=built_in)
        weights = list(training.model.parameters())
    optimizer = OPTIMIZERS[recipe.optimizer]
    # 8-bit states have scales, small tensors keep 32 bits, and paged ones may leave: count none.
    states = optimizer.states if optimizer.bits == 32 else 0
    trained = 1 + states - recipe.step_in_backward if recipe.optimizer_offload == "none" else 0
    return sum(weight.nbytes * (1 + weight.requires_grad * trained) for weight in weights)
