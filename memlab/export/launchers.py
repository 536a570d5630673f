"""From one process to several: starting ranks here, and what starts them elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from memlab import models
from memlab.fields import whole, wrong
from memlab.spec.recipe import FULLY_SHARDED, Recipe
from memlab.workloads.sharding import layers_of

SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:True"  # of recipes that have them


class RanksFailed(RuntimeError):
    """A rank ended with an error, or not all of them ended in time."""


def run_ranks(script: Path | str, ranks: int, seconds: float = 120, launcher=()) -> list[dict]:
    """Run a script in so many processes on this machine; what each rank printed as JSON.

    ranks: from 1. seconds: after which all are ended, as on an error and on Ctrl-C. launcher:
    words in place of torchrun's. torchrun takes a free port by itself. Each rank prints one object
    of JSON, and nothing else; they come back ordered by their "rank".

    Raises RanksFailed, in one line, with the last line of what they said.
    """
    whole(1)("ranks", ranks)
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, "-m", *(launcher or torchrun), str(script)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )
    try:
        said, problems = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RanksFailed(f"{ranks} ranks did not end within {seconds} seconds") from None
    finally:
        _end(process)
    if process.returncode:
        raise RanksFailed(_cause(problems) or f"exit code {process.returncode}")
    return sorted(_objects(said), key=lambda one: one["rank"])


def _objects(text: str) -> list[dict]:
    """The JSON objects in a text. Two ranks' prints may meet before the end of a line."""
    found, place = [], text.find("{")
    while place >= 0:
        one, end = json.JSONDecoder().raw_decode(text, place)
        found.append(one)
        place = text.find("{", end)
    return found


def _end(process: subprocess.Popen) -> None:
    """End the launcher, which ends its ranks, each of them in a session of its own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _cause(problems: str) -> str:
    """The first exception that a rank named, or what torchrun says of its exit code."""
    lines = [line.split("]:")[-1].strip() for line in problems.splitlines()]
    for mark in ("Error:", "exitcode"):
        for line in lines:
            if mark in line and "ChildFailedError" not in line:
                return line
    return lines[-1] if lines else ""


def accelerate_config(recipe: Recipe, machines: int = 1, cpu: bool = False) -> str:
    """The file that `accelerate launch --config_file` takes for a recipe's ranks, as YAML.

    machines: among which the ranks are divided equally; which of them one is, and where the first
    is found, `slurm_script(..., config=...)` says on each. cpu: for processes without a GPU.

    Raises ValueError where ranks do not divide among machines, for `zero1`, which Accelerate
    leaves to DeepSpeed, and for several `replicas`.
    """
    _per_machine(recipe, machines)
    if recipe.sharding == "zero1":
        raise wrong("sharding", "zero1", "with Accelerate ddp, zero2, zero3")
    if recipe.replicas > 1:
        raise wrong("replicas", recipe.replicas, "in this file 1")
    shards = recipe.sharding in FULLY_SHARDED
    half = recipe.precision.removesuffix("-amp") if recipe.precision.endswith("-amp") else "no"
    kind = "FSDP" if shards else "MULTI_CPU" if cpu else "MULTI_GPU"
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind if recipe.ranks > 1 else "NO",
        "num_machines": machines,
        "num_processes": recipe.ranks,
        "mixed_precision": half,
        "use_cpu": cpu,
    }
    if shards:
        with torch.device("meta"):
            model = models.build(recipe.model, recipe.task)
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": type(layers_of(model)[0]).__name__,
            "fsdp_reshard_after_forward": recipe.sharding == "zero3",
            "fsdp_activation_checkpointing": recipe.checkpointing != "none",
        }
    return yaml.safe_dump(values, sort_keys=False)


def slurm_script(
    recipe: Recipe,
    machines: int,
    script: str = "train.py",
    hours: int = 1,
    config: str | None = None,
) -> str:
    """A Slurm batch script that starts a recipe's ranks by one launcher on each machine.

    machines: among which the ranks are divided equally, a GPU for each. script: the program,
    relative to where `sbatch` is called. hours: the time that is asked for. config: the file of
    `accelerate_config`, for a program that leaves sharding to Accelerate or the Trainer;
    `accelerate launch` reads it, and torchrun, the launcher without it, does not.

    Raises ValueError where ranks do not divide among machines.
    """
    each = _per_machine(recipe, machines)
    whole(1)("hours", hours)
    if config is None:
        start = f"""\
torchrun \\
    --nnodes={machines} --nproc-per-node={each} \\
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \\
    --rdzv-endpoint="$first:$port" \\
    {shlex.quote(script)}"""
    else:  # a shell on each machine, which alone knows its SLURM_NODEID
        launch = f"""\
accelerate launch \\
    --config_file {shlex.quote(config)} --machine_rank $SLURM_NODEID \\
    --main_process_ip $first --main_process_port $port \\
    {shlex.quote(script)}"""
        start = f"bash -c {shlex.quote(launch)}"
    grow = f"export {SEGMENTS}\n" if recipe.expandable_segments else ""
    return f"""\
#!/bin/bash
#SBATCH --nodes={machines}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
#SBATCH --time={hours:02}:00:00

{grow}export first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export port=$((20000 + SLURM_JOB_ID % 20000))
srun {start}
"""


def _per_machine(recipe: Recipe, machines: int) -> int:
    whole(1)("machines", machines)
    if recipe.ranks % machines:
        raise ValueError(f"ranks is {recipe.ranks}: allowed are multiples of {machines} machines")
    return recipe.ranks // machines
