"""Measure the memory and the time of training steps on this machine's own GPU or CPU.

On CUDA the bytes are the caching allocator's counters. On a CPU they are the exact sum of the
tensors alive, which a `Tracer` follows. Times are wall-clock times around a synchronized device.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from memlab.fields import integer_from
from memlab.footprint import Category, Footprint, Phase
from memlab.gpus import require_native
from memlab.libraries import installed
from memlab.predict.progress import Progress
from memlab.predict.recipe_log import require_recipe, warm_up_bytes
from memlab.spec.recipe import QUANTIZED, Recipe
from memlab.trace.card_memory import VARIABLES
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

EXPANDABLE = "expandable_segments"
Device = str | torch.device


@dataclass(frozen=True)
class Measurement:
    """The result of `measure` for one optimizer step, in bytes and seconds.

    footprint: the memory of the step.
    step_seconds: {"median", "lower_quartile", "upper_quartile"} of the timed steps.
    samples_per_second: sequences of the whole effective batch, divided by the median step time.
    device: the name of the device, as `device_name` gives it.
    versions: library -> its release.
    """

    footprint: Footprint
    step_seconds: dict[str, float]
    samples_per_second: float
    device: str
    versions: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return self.footprint.as_dict() | {
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "device": self.device,
            "versions": self.versions,
        }

    def __str__(self) -> str:
        seconds = self.step_seconds
        return (
            f"{self.footprint}\n"
            f"step: median {seconds['median'] * 1e3:,.1f} ms, quartiles "
            f"{seconds['lower_quartile'] * 1e3:,.1f} to {seconds['upper_quartile'] * 1e3:,.1f}; "
            f"{self.samples_per_second:,.1f} samples/s on {self.device}"
        )


def seconds(
    work: Callable[..., object],
    *given: object,
    clock: Callable[[], float] = time.perf_counter,
    device: Device | None = None,
) -> float:
    """The seconds of `work(*given)`; the device is synchronized before and after.

    clock: returns the time in seconds.
    device: `cuda` or `cpu`; None takes the device of `pick_device`.
    """
    device = pick_device(device)
    synchronize(device)
    began = clock()
    work(*given)
    synchronize(device)
    return clock() - began


def measure(
    recipe: Recipe, device: Device | None = None, steps: int = 5, seed: int = 0
) -> Measurement:
    """Train `recipe` for a few steps on this machine and report the memory and time they took.

    device: `cuda` or `cpu`; None takes CUDA if this machine has it.
    steps: number of timed steps; three untimed steps come before them.
    seed: seed of the weights, the data and the dropout.

    On CUDA the peaks are the allocator's counters, and `device_used` is what the driver reports. On
    a CPU, which has no caching allocator, the peak is the exact sum of the tensors alive. The cache
    is emptied before the model is built and then left alone, as in a training. A quantized base is
    loaded as `from_pretrained` loads it (`memlab.workloads.quantized.load`). A recipe's
    `expandable_segments` is set for the time of the measurement. Without it the allocator keeps the
    settings of the process, including those of PYTORCH_ALLOC_CONF.

    Raises ValueError if the device does not have the recipe's number format, and for a device that
    this machine does not have. Also for a recipe with several ranks, and for `steps` below 1.
    """
    require_recipe(recipe)
    device = pick_device(device)
    require(recipe, device)
    integer_from(1)("steps", steps)
    if recipe.ranks > 1:
        raise ValueError(
            f"ranks is {recipe.ranks}: memlab measures one process only, simulate them"
        )
    with allocator_of(recipe, device):
        return _measured(recipe, device, steps, seed)


@contextlib.contextmanager
def allocator_of(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Switch expandable segments on for a recipe that has them, on CUDA; restored at the end."""
    if device.type != "cuda" or not recipe.expandable_segments:
        yield
        return
    # `parseArgs` in c10/core/AllocatorConfig.cpp first resets settings such as max_split_size_mb to
    # their defaults, so repeat what the process has set.
    before = _allocator_settings()
    torch._C._accelerator_setAllocatorSettings(f"{before},{EXPANDABLE}:True".lstrip(","))
    try:
        yield
    finally:
        # `parseArgs` leaves expandable segments as they are unless they are named.
        before = before if EXPANDABLE in before else f"{before},{EXPANDABLE}:False"
        torch._C._accelerator_setAllocatorSettings(before.lstrip(","))


def _allocator_settings() -> str:
    """The settings of PyTorch's allocator, as a text.

    PyTorch 2.11 has no function that returns them; there they are read from the environment.
    """
    get_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get_settings:
        return get_settings()
    return next((os.environ[name] for name in VARIABLES if name in os.environ), "")


def _measured(recipe: Recipe, device: torch.device, steps: int, seed: int) -> Measurement:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        if recipe.base in QUANTIZED:
            # Allocated and freed at once, as `caching_allocator_warmup` in transformers does. The
            # cached block then serves the weights.
            _, total = torch.cuda.mem_get_info(device)
            torch.empty(warm_up_bytes(recipe, total), dtype=torch.uint8, device=device)
    # A base is built on the host and quantized weight by weight on its way to the device.
    built_in = None if recipe.base in QUANTIZED else device
    training = Training(recipe, device, seed, built_in)
    with Progress(total=steps + 3, desc=f"measuring {recipe.model_name}") as progress:
        training.step()  # allocates the optimizer states and loads the kernels
        progress.update()
        watched = training.model, training.optimizer, training.inputs
        with Meter(device, *watched, empty_cache=False) as meter:
            training.step()
        progress.update()
        training.step()  # a second warm-up, after the metered step
        progress.update()
        taken = []
        for _ in range(steps):
            taken.append(seconds(training.step, device=device))
            progress.update()
    footprint = replace(
        meter.footprint,
        parameters=training.parameters,
        trainable_parameters=training.trainable_parameters,
    )
    if device.type == "cuda":
        # After the timed steps, which the tracer would slow down.
        footprint = with_breakdown(footprint, training)
    lower, median, upper = np.percentile(taken, (25, 50, 75)).tolist()
    return Measurement(
        footprint=footprint,
        step_seconds={"median": median, "lower_quartile": lower, "upper_quartile": upper},
        samples_per_second=recipe.batch_size * recipe.accumulation / median,
        device=device_name(device),
        versions=versions(),
    )


class Meter:
    """Measure the memory and the time of a block of your own code.

        with Meter(model=model, optimizer=optimizer) as meter:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(meter.footprint)

    device: `cuda` or `cpu`; None takes CUDA if this machine has it.
    model, optimizer, inputs: on a CPU, tensors that count from the start even if the block never
        touches them. Tensors that the block touches are found without being named here.
    empty_cache: whether unused cached blocks are returned to the device first. If not, they are
        part of the reserved memory, as after the steps of a training.

    On CUDA the block runs undisturbed, and the figures are the caching allocator's counters. The
    breakdown therefore has two parts only: the bytes allocated at the start (`inputs`) and those
    allocated on top (`temporary`). The context is what the whole GPU uses beyond this process's
    reserved memory, so it includes other processes on that GPU. On a CPU every storage is traced,
    and the time includes the tracing.

    Attributes after the block: `footprint`, `seconds`, and `already_there`. The last is a list of
    (bytes, description) of the largest tensors alive on the device when the block began.
    """

    def __init__(
        self,
        device: Device | None = None,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Iterable[torch.Tensor] = (),
        empty_cache: bool = True,
    ) -> None:
        self.device = pick_device(device)
        self._watched = model, optimizer, inputs
        self._empty_cache = empty_cache
        self.already_there: list[tuple[int, str]] = []

    def __enter__(self) -> Meter:
        gc.collect()  # so that tensors in reference cycles do not count
        self.already_there = alive_tensors(self.device)
        if self.device.type == "cuda":
            if self._empty_cache:
                torch.cuda.empty_cache()
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._at_start = torch.cuda.memory_allocated(self.device)
        else:
            self._tracer = Tracer()
            self._tracer.watch(*self._watched)
            self._tracer.__enter__()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        synchronize(self.device)
        self.seconds = time.perf_counter() - self._started
        if self.device.type == "cuda":
            self.footprint = self._from_counters()
        else:
            self._tracer.__exit__(*error)
            self.footprint = self._tracer.footprint()
            del self._tracer

    def _from_counters(self) -> Footprint:
        free, total = torch.cuda.mem_get_info(self.device)
        used, reserved = total - free, torch.cuda.memory_reserved(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        # The counters know no categories and no phases; `with_breakdown` adds them.
        return Footprint(
            peak_allocated=peak,
            peak_reserved=torch.cuda.max_memory_reserved(self.device),
            breakdown={
                Category.INPUTS: self._at_start,
                Category.TEMPORARY: peak - self._at_start,
            },
            peak_phase=Phase.UNKNOWN,
            context=used - reserved,
            device_used=used,
        )


def alive_tensors(device: Device, most: int = 5) -> list[tuple[int, str]]:
    """The largest tensors on a device that Python still references: (bytes, shape and dtype).

    most: how many to return, the largest first.

    A storage that several tensors share counts once, in full.

    Known limitations: tensors that only the autograd graph holds are not found, nor are objects of
    subclasses other than `torch.nn.Parameter`.
    """
    device = torch.device(device)
    storages: dict[int, tuple[int, str]] = {}
    for thing in gc.get_objects():
        if (
            type(thing) in (torch.Tensor, torch.nn.Parameter)
            and thing.device.type == device.type
            and device.index in (None, thing.device.index)
        ):
            storage = thing.untyped_storage()
            text = f"{type(thing).__name__} {list(thing.shape)} {thing.dtype}"
            storages[storage._cdata] = (storage.nbytes(), text)
    return sorted(storages.values(), reverse=True)[:most]


def with_breakdown(footprint: Footprint, training: Training) -> Footprint:
    """A footprint from CUDA's counters, with the breakdown, phase and timeline of a traced step.

    Tracing makes autograd add some gradients out of place, so the peak itself stays that of the
    undisturbed step. Bytes that the traced tensors do not explain belong to libraries and to the
    allocator, and count as rounding. The footprint gets no breakdown if the traced step runs out
    of memory.
    """
    tracer = Tracer()
    tracer.watch(training.model, training.optimizer, training.inputs)
    try:
        with tracer:
            training.step()
    except torch.OutOfMemoryError:
        return footprint
    traced = tracer.footprint()
    breakdown = dict(traced.breakdown)
    breakdown[Category.ROUNDING] = footprint.peak_allocated - sum(breakdown.values())
    return replace(
        footprint,
        breakdown=breakdown,
        peak_phase=traced.peak_phase,
        timeline=traced.timeline,
    )


def pick_device(device: Device | None = None) -> torch.device:
    """The given device; for None, CUDA if this machine has it, else the CPU.

    Raises ValueError for a device that this machine does not have.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    here = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    if chosen is None or chosen.type not in here:
        raise ValueError(f"device is {str(device)!r}: this machine has {', '.join(here)}")
    return chosen


def require(recipe: Recipe, device: torch.device) -> None:
    """Raise ValueError if a GPU can only emulate a recipe's number formats."""
    if device.type == "cuda":
        with torch.cuda.device(device):  # the next line asks about the current one
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        for precision in (recipe.precision, recipe.compute_dtype or ""):
            require_native(precision, device_name(device), has_bf16)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's architecture and the number of threads PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def versions() -> dict[str, str]:
    """Library -> its release, of every library that the figures depend on."""
    releases = installed() | {"memlab": importlib.metadata.version("gpu-memory-lab")}
    return releases | {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
