"""The runs that `memlab record` makes on a machine, one fresh process each, and what they took.

The grid is fixed, so that records of different cards can be laid side by side. It is sent through
by `record`, which keeps every finished row at once and goes on where it was stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm.auto import tqdm

from memlab import fake
from memlab.footprint import CATEGORIES, NOT_TENSORS, mib
from memlab.measure import device_name, measure, pick_device, versions
from memlab.quantized import import_bitsandbytes
from memlab.recipe import ATTENTION, OPTIMIZERS, PRECISIONS, Recipe
from memlab.records import FOLDER, Record, load, records, save
from memlab.training import Training

# A row: model, micro-batch x length, and what differs from Recipe's defaults (fp32, eager,
# adamw_torch, nothing frozen). The rows that say most come first, for a card that is lent for
# minutes; the others are ordered by model. Another row is another line: names of a precision, an
# attention or an optimizer stand alone, other fields as field=value.
ROWS = """
bert-large 8x512
llama-3.2-1b 1x1024 bf16 sdpa
gpt2 4x1024 bf16-amp sdpa adamw_torch_fused
llama-3-8b 1x2048 bf16 sdpa adamw_torch_fused lora_rank=16 checkpointing
bert-large 8x512 fp16-amp sdpa
gpt2-xl 1x1024 adafactor checkpointing
distilbert 32x128
qwen2.5-0.5b 2x1024 bf16-amp
llama-3.2-3b 1x2048 bf16 sdpa adamw_8bit checkpointing
bert-base 16x512 bf16-amp sdpa freeze=embeddings,6

distilbert 16x512 bf16 sdpa adamw_torch_fused
distilbert 32x128 fp16-amp sgd
bert-base 32x128 freeze=backbone
bert-base 16x512 fp16-amp
bert-base 8x512 adafactor
bert-base 8x512 adamw_8bit
bert-base 8x512 sdpa task=masked-lm
bert-base 8x512 lora_rank=8 lora_dropout=0.1
bert-large 4x512 sgd
bert-large 4x512 bf16 sdpa lion_8bit
bert-large 8x512 bf16-amp sdpa checkpointing
bert-large 4x512 fp16-amp lora_rank=16
bert-large 16x128 adamw_torch_fused
bert-large 2x512 sdpa accumulation=4
roberta-base 16x256 bf16-amp sdpa
roberta-base 8x512 checkpointing
deberta-v3-base 4x512
deberta-v3-base 8x256 bf16-amp checkpointing adamw_torch_fused
t5-3b 1x512 bf16 adafactor checkpointing

gpt2 4x1024
gpt2 4x1024 sdpa
gpt2 8x512 fp16-amp
gpt2 8x1024 bf16 sdpa checkpointing
gpt2 4x1024 sdpa freeze=embeddings,8
gpt2 2x1024 accumulation=4 adamw_torch_loop
gpt2-medium 2x1024 sdpa adamw_8bit
gpt2-medium 4x1024 bf16-amp sdpa checkpointing
gpt2-large 1x1024 sgd
gpt2-large 2x512 bf16 sdpa
gpt2-xl 1x1024 bf16 sdpa adamw_torch_fused
gpt2-xl 1x1024 fp16-amp sdpa checkpointing
qwen2.5-0.5b 4x512 sdpa
qwen2.5-0.5b 4x1024 fp16-amp sdpa lora_rank=16
qwen2.5-0.5b 1x4096 bf16-amp sdpa checkpointing
qwen2.5-1.5b 2x1024 bf16 sdpa
qwen2.5-1.5b 1x2048 bf16 eager lora_rank=64
llama-3.2-1b 2x512 sdpa
llama-3.2-1b 1x1024 bf16
llama-3.2-1b 4x128 bf16 sdpa sgd
llama-3.2-1b 1x8192 bf16 sdpa checkpointing
llama-3.2-1b 1x2048 bf16-amp sdpa checkpointing
llama-3.2-1b 1x2048 bf16 sdpa lora_rank=16 lora_targets=q_proj,v_proj
llama-3.2-1b 1x2048 bf16 sdpa paged_adamw_8bit
llama-3.2-3b 1x1024 bf16 sdpa freeze=embeddings,14
llama-3.2-3b 1x1024 adafactor sdpa checkpointing
llama-3.2-3b 2x2048 bf16 sdpa lora_rank=16 lora_dropout=0.05
mistral-7b 1x1024 bf16 sdpa lora_rank=8 checkpointing
mistral-7b 1x4096 bf16 sdpa lora_rank=16 lora_dropout=0.05 checkpointing
qwen2.5-7b 1x2048 bf16 sdpa lora_rank=16
llama-2-7b 1x512 bf16 lora_rank=16 lora_half
llama-2-7b 1x1024 bf16 sdpa lion_8bit checkpointing
llama-3-8b 1x8192 bf16 sdpa lora_rank=16 checkpointing
llama-3-8b 1x1024 bf16 sdpa checkpointing
llama-3-8b 1x512 bf16 sdpa adafactor
llama-3-8b 1x2048 bf16 sdpa freeze=backbone
llama-3-8b 1x512 sdpa adamw_torch checkpointing

llama-3.2-1b 2x512 fp16-amp sdpa lora_rank=16 base=nf4
llama-3.2-3b 1x1024 bf16 eager lora_rank=16 base=fp4 no_upcast
qwen2.5-7b 1x1024 bf16-amp sdpa lora_rank=16 base=int8 checkpointing
mistral-7b 2x512 bf16 sdpa lora_rank=64 base=nf4 double_quant no_upcast
llama-3-8b 1x2048 bf16-amp sdpa lora_rank=16 base=nf4 checkpointing paged_adamw_8bit
llama-3-8b 4x512 bf16-amp sdpa lora_rank=16 lora_dropout=0.05 base=nf4 double_quant checkpointing
"""
# Cores from which on the next process starts while one is measured: fewer would disturb its clock.
ROOMY = 8


def grid(tiny: bool = False) -> dict[str, Recipe]:
    """Name -> recipe of every run, in the order of running.

    tiny: the same runs on the models' tiny twins, sequences cut to a sixteenth (32 tokens at
        least) and one layer of two frozen, for machines without a GPU.
    """
    runs = {" ".join(line.split()): _recipe(line) for line in ROWS.splitlines() if line}
    nine = {f"published: {run.name}": Recipe(**run.recipe) for run in records("published")}
    first = dict(list(runs.items())[:10])
    runs = first | nine | runs
    if tiny:
        return {name: _twin(recipe) for name, recipe in runs.items()}
    return runs


def _twin(recipe: Recipe) -> Recipe:
    frozen = tuple(min(part, 1) if isinstance(part, int) else part for part in recipe.freeze)
    return recipe.twin(seq_len=max(32, recipe.seq_len // 16), freeze=frozen)


def _recipe(line: str) -> Recipe:
    model, size, *words = line.split()
    batch, length = size.split("x")
    fields = {"model": model, "batch_size": int(batch), "seq_len": int(length)}
    alone = {
        "checkpointing": ("checkpointing", True),
        "lora_half": ("lora_fp32", False),
        "double_quant": ("double_quant", True),
        "no_upcast": ("upcast", False),
    }
    for name, allowed in (
        ("precision", PRECISIONS),
        ("attention", ATTENTION),
        ("optimizer", OPTIMIZERS),
    ):
        alone |= {value: (name, value) for value in allowed}
    for word in words:
        if word in alone:
            name, value = alone[word]
        else:
            name, value = word.split("=")
            value = int(value) if value.isdigit() else value
            value = float(value) if name == "lora_dropout" else value
        fields[name] = value
    return Recipe(**fields)


def select(runs: dict[str, Recipe], only: str) -> dict[str, Recipe]:
    """The runs whose name holds every word of `only`. Raises ValueError if none does."""
    found = {n: r for n, r in runs.items() if all(w in n.split() for w in only.split())}
    if not found:
        words = sorted({word for name in runs for word in name.split()})
        raise ValueError(f"no run of the grid has {only!r}: its words are {', '.join(words)}")
    return found


@dataclass
class Report:
    """What became of a grid's runs: names, or name -> why in one line.

    path: the file with the records. kept: there before. done: run now, `out_of_memory` among
    them. skipped: cannot run on this machine. failed: ended with an error or beyond its time.
    left: not begun because the time was up.
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
            lines.append(f"{len(self.left)} left when the time was up; start again to go on")
        return "\n".join([*lines, f"records: {self.path}"])


def record(
    device=None,
    out: Path | str = FOLDER,
    runs: dict[str, Recipe] | None = None,
    limit_seconds: float = float("inf"),
    run_seconds: float = 300.0,
    steps: int = 3,
) -> Report:
    """Measure every run of the grid that `out` has no record of yet, and keep each at once.

    device: `cuda` or `cpu`; None takes CUDA where there is one. A CPU runs the tiny twins.
    out: the folder for the file, one a device.
    runs: name -> recipe; None takes `grid()`.
    limit_seconds: for all runs together; what is running then is stopped and not kept.
    run_seconds: for one run. steps: timed steps of each, after the warm-up of `measure`.

    Each run has a process of its own, which ends with the one that started it. Running out of
    memory is a result and recorded; what the device cannot do is skipped and said. Raises
    ValueError for a file of `out` that is not whole, before anything runs.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps!r}: allowed are whole numbers from 1")
    device = pick_device(device)
    runs = grid(tiny=device.type == "cpu") if runs is None else runs
    started = time.monotonic()
    here = _machine(device)
    report = Report(file_of(here["device_name"], out), here["device_name"])
    finished = {run.name: Recipe(**run.recipe) for run in _load(report.path)}
    report.kept = [name for name in runs if finished.get(name) == runs[name]]
    todo = [name for name in runs if name not in report.kept]
    roomy = device.type == "cuda" and (os.cpu_count() or 1) >= ROOMY
    bar = tqdm(total=len(runs), initial=len(report.kept), desc=report.device, unit="run")
    worker = None
    try:
        for name, following in itertools.zip_longest(todo, todo[1:]):
            bar.set_postfix_str(name)
            why = cannot_fit(runs[name], here["total_memory"])
            remaining = limit_seconds - (time.monotonic() - started)
            if why:
                report.skipped[name] = why
            elif remaining <= 0:
                report.left.append(name)
            else:
                running, worker = worker or Worker(), None
                order = {"device": str(device), "recipe": runs[name].as_dict(), "steps": steps}
                try:
                    running.begin(order)
                    if roomy and following:
                        worker = Worker()
                        cannot_fit(runs[following], here["total_memory"])  # kept for its turn
                    answer = running.answer(min(run_seconds, remaining))
                finally:
                    running.end()
                if answer.get("stopped") and remaining < run_seconds:
                    report.left.append(name)
                else:
                    _enter(report, here, name, runs[name], answer)
            bar.update()
    finally:
        bar.close()
        if worker:
            worker.end()
        report.seconds = time.monotonic() - started
    return report


def file_of(device_name: str, folder: Path | str = FOLDER) -> Path:
    """The file of a device's records."""
    return Path(folder) / f"{re.sub('[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def _machine(device: torch.device) -> dict:
    """What the machine is; CUDA is asked in another process, for its context takes memory."""
    if device.type == "cpu":
        return _about({"device": "cpu"})
    worker = Worker()
    try:
        worker.begin({"device": str(device)})
        here = worker.answer(120.0)
    finally:
        worker.end()
    if "failed" in here:
        raise OSError(f"{device} cannot be asked what it is: {here['failed']}")
    return here


def _enter(report: Report, here: dict, name: str, recipe: Recipe, answer: dict) -> None:
    """Sort one run's answer into the report, and its figures into the file."""
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
            recipe=json.loads(json.dumps(recipe.as_dict())),
            figures=answer["figures"],
            device=here["device_name"],
            driver=here["driver"],
            versions=here["versions"],
            date=datetime.date.today().isoformat(),
            source=_source(),
        )
        # Read anew, so that what another start of the same grid has written stays.
        save(report.path, [*(old for old in _load(report.path) if old.name != name), run])
        report.done.append(name)
        if "out_of_memory" in answer["figures"]:
            report.out_of_memory.append(name)


def _load(path: Path) -> list[Record]:
    return load(path) if path.exists() else []


@functools.cache
def _source() -> str:
    """The commit of memlab, or its version where it is not in a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        out = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        return f"commit {out}"
    except (OSError, subprocess.CalledProcessError):
        return f"memlab {versions()['memlab']}"


def cannot_fit(recipe: Recipe, total_memory: int | None) -> str:
    """Why a recipe surely does not fit into so many bytes, in one line; empty if it may.

    Weights, gradients and optimizer states are together on the card in the optimizer's step: what
    passes the card with these alone is not worth the minute of trying.
    """
    if total_memory is None:
        return ""
    try:
        least = least_bytes(recipe)
    except ValueError:
        return ""  # the run itself says what is wrong
    if least <= total_memory:
        return ""
    return (
        f"weights, gradients and states alone take {mib(least)}, the card has {mib(total_memory)}"
    )


# Bytes of optimizer states for each byte of the weights; the others take less, or vary.
STATES = {"adamw_torch": 2, "adamw_torch_loop": 2, "adamw_torch_fused": 2, "sgd": 1}


@functools.lru_cache(maxsize=4)
def least_bytes(recipe: Recipe) -> int:
    """Bytes of weights, gradients and optimizer states, a lower bound of any run's peak."""
    if recipe.optimizer.endswith("8bit") or recipe.base != "none":
        import_bitsandbytes(f"optimizer {recipe.optimizer}, base {recipe.base}")
    with fake.tensors_without_data():
        model = Training(recipe.but(batch_size=1, accumulation=1)).model
        weights = {id(p): p.nbytes for p in model.parameters()}
        trained = {id(p): p.nbytes for p in model.parameters() if p.requires_grad}
    return sum(weights.values()) + sum(trained.values()) * (1 + STATES.get(recipe.optimizer, 0))


# ---------------------------------------------------------------------- processes


class Worker:
    """A fresh process that imports what it needs, answers one order and ends."""

    def __init__(self):
        # Files instead of pipes: nobody has to read while the process runs.
        self._out, self._errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memlab.grid"],
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._errors,
            text=True,
            env=os.environ | {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"},
        )

    def begin(self, order: dict) -> None:
        """Give the order. The pipe stays open: when it closes, the process ends at once."""
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already, and `answer` says why

    def answer(self, seconds: float) -> dict:
        """What came back in so many seconds, or `failed` and why in one line."""
        try:
            status = self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return {"failed": f"stopped after {seconds:,.0f} s", "stopped": True}
        lines = _lines(self._out)
        if status == 0 and lines:
            return json.loads(lines[-1])
        lines = _lines(self._errors)
        return {"failed": lines[-1] if lines and status > 0 else f"ended with status {status}"}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._out.close()
        self._errors.close()


def _lines(file) -> list[str]:
    file.seek(0)
    return [line.strip() for line in file if line.strip()]


def work() -> None:
    """What a worker does: one order from standard input, one answer as the last line of output."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(_about(order) if "recipe" not in order else _measured(order)), flush=True)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _about(order: dict) -> dict:
    """The machine's name, memory in bytes (None for a CPU), driver and versions."""
    device, total = torch.device(order["device"]), None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    return {
        "device_name": device_name(device),
        "total_memory": total,
        "driver": _driver() if device.type == "cuda" else None,
        "versions": versions(),
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return out.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


# How a device without room speaks, beside torch.OutOfMemoryError: the host's memory, the driver
# outside PyTorch's allocator, cuBLAS's handle.
NO_ROOM = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def _measured(order: dict) -> dict:
    try:
        result = measure(Recipe(**order["recipe"]), order["device"], order["steps"])
    except torch.OutOfMemoryError:
        return {"figures": {"out_of_memory": True}}
    except ValueError as error:
        return {"refused": str(error).splitlines()[0]}
    except RuntimeError as error:
        if any(words in str(error) for words in NO_ROOM):
            return {"figures": {"out_of_memory": True}}
        raise
    return {"figures": _figures(result)}


def _figures(result) -> dict[str, float]:
    """A measurement in the names of a record. A CPU's peak is of tensors, not of blocks."""
    footprint, seconds = result.footprint, result.step_seconds
    if footprint.peak_reserved is None:
        figures = {"peak_tensors_bytes": footprint.peak_allocated}
    else:
        figures = {
            "peak_allocated_bytes": footprint.peak_allocated,
            "peak_reserved_bytes": footprint.peak_reserved,
            "context_bytes": footprint.context,
            "device_used_bytes": footprint.device_used,
        }
    if footprint.peak_phase != "unknown":
        shown = [name for name in CATEGORIES if name not in NOT_TENSORS]
        figures |= {f"{name}_at_peak_bytes": footprint.breakdown.get(name, 0) for name in shown}
    return figures | {
        "step_seconds": seconds["median"],
        "step_lower_quartile_seconds": seconds["lower_quartile"],
        "step_upper_quartile_seconds": seconds["upper_quartile"],
        "samples_per_second": result.samples_per_second,
    }


if __name__ == "__main__":
    work()
