"""Runs each recipe of the grid in a process of its own, so that no run inherits from another.

The parent sends one order as JSON on standard input. The worker answers with one line of JSON, the
last one on standard output.
"""

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
    """The answer of a fresh process to one order, or `failed` with the reason in one line.

    seconds: after which the process is stopped (`stopped` is then True). It ends with this process
    in any case.
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
    # A negative return code is a signal: its standard error explains nothing.
    errors = done.stderr.strip().splitlines() if done.returncode > 0 else ()
    return {"failed": errors[-1] if errors else f"ended with status {done.returncode}"}


def work() -> None:
    """Be a worker: read one order, print one answer. An order without a recipe asks `about`."""
    order = json.load(sys.stdin)
    threading.Thread(target=_end_with, args=(order["parent"],), daemon=True).start()
    print(json.dumps(about(order) if "recipe" not in order else _measured(order)), flush=True)


def _end_with(parent: int) -> None:
    """End this process once its parent has ended: the system then gives it another parent."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def about(order: dict) -> dict:
    """The device's name, memory in bytes (None for a CPU), driver and library versions."""
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


# Out-of-memory messages whose error is no torch.OutOfMemoryError. They come from the host's
# allocator, from the driver outside PyTorch's allocator, and from cuBLAS when it makes a handle.
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
    """The figures of a measurement under the names of a record.

    The peak of a CPU is one of tensors, not of allocator blocks, and has a name of its own.
    """
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
