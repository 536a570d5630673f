"""A process of its own for each run of the grid, so that one run leaves nothing to the next."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import Any, Self, TextIO

import torch

from memlab.footprint import NOT_TENSORS, Category, Phase
from memlab.libraries import first_line
from memlab.predict.measure import Measurement, device_name, measure, versions
from memlab.spec.recipe import Recipe


class Worker:
    """A fresh process that imports what it needs, answers one order and ends with the context."""

    command = [sys.executable, "-m", "memlab.evidence.worker"]

    def __init__(self) -> None:
        # Files instead of pipes: nobody has to read while the process runs.
        self._out, self._errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        self._process: Any = subprocess.Popen(
            self.command,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.end()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._out.close()
        self._errors.close()


def _lines(file: TextIO) -> list[str]:
    file.seek(0)
    return [line.strip() for line in file if line.strip()]


def work() -> None:
    """What a worker does: one order from standard input, one answer as the last line of output."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(about(order) if "recipe" not in order else _measured(order)), flush=True)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def about(order: dict) -> dict:
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
        return {"refused": first_line(error)}
    except RuntimeError as error:
        if any(words in str(error) for words in NO_ROOM):
            return {"figures": {"out_of_memory": True}}
        raise
    return {"figures": figures_of(result)}


def figures_of(result: Measurement) -> dict[str, float | None]:
    """A measurement in the names of a record. A CPU's peak is of tensors, not of blocks."""
    footprint, seconds = result.footprint, result.step_seconds
    if footprint.peak_reserved is None:
        figures: dict[str, float | None] = {"peak_tensors_bytes": footprint.peak_allocated}
    else:
        figures = {
            "peak_allocated_bytes": footprint.peak_allocated,
            "peak_reserved_bytes": footprint.peak_reserved,
            "context_bytes": footprint.context,
            "device_used_bytes": footprint.device_used,
        }
    if footprint.peak_phase != Phase.UNKNOWN:
        shown = [name for name in Category if name not in NOT_TENSORS]
        figures |= {f"{name}_at_peak_bytes": footprint.breakdown.get(name, 0) for name in shown}
    return figures | {
        "step_seconds": seconds["median"],
        "step_lower_quartile_seconds": seconds["lower_quartile"],
        "step_upper_quartile_seconds": seconds["upper_quartile"],
        "samples_per_second": result.samples_per_second,
    }


if __name__ == "__main__":
    work()
