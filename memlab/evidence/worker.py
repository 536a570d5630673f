"""A process of its own for each run of the grid, so that one run leaves nothing to the next."""

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from memlab.footprint import NOT_TENSORS, Category, Phase
from memlab.libraries import first_line
from memlab.predict.measure import Measurement, device_name, measure, versions
from memlab.spec.recipe import Recipe

COMMAND = [sys.executable, "-m", "memlab.evidence.worker"]


def ask(order: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What a fresh process answers to one order, or `failed` and why in one line.

    It is stopped after so many seconds, and ends when this process does.
    """
    quiet = os.environ | {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    text = json.dumps(order | {"parent": os.getpid()})
    try:
        done = subprocess.run(
            COMMAND, input=text, env=quiet, capture_output=True, text=True, timeout=max(0, seconds)
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {seconds:,.0f} s", "stopped": True}
    if done.returncode == 0 and done.stdout.strip():
        return json.loads(done.stdout.strip().splitlines()[-1])
    errors = done.stderr.strip().splitlines() if done.returncode > 0 else ()
    return {"failed": errors[-1] if errors else f"ended with status {done.returncode}"}


def work() -> None:
    """What a worker does: one order from standard input, one answer as the last line of output."""
    order = json.load(sys.stdin)
    threading.Thread(target=_end_with, args=(order["parent"],), daemon=True).start()
    print(json.dumps(about(order) if "recipe" not in order else _measured(order)), flush=True)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, and another one has taken its place."""
    while os.getppid() == parent:
        time.sleep(1)
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
