"""Chapter 17: its arithmetic is the paper's, its schedules are PyTorch's."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from notebook import Notebook, cells_of
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

CHAPTER = Notebook("17-parallel")


chapter = cells_of("17-parallel", "imports bytes pipeline-bubble")


def test_the_arithmetic_is_that_of_the_paper(chapter):
    ways = ("ddp", "zero1", "zero2", "zero3")
    said = [7.5 * chapter["bytes_per_parameter"](way, 64) for way in ways]
    assert said == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)
    assert chapter["bytes_per_parameter"]("zero3", 16) == 1


@pytest.mark.parametrize("stages, micro_batches", [(4, 6), (8, 64)])
def test_a_schedule_holds_as_many_micro_batches_as_pytorchs(chapter, stages, micro_batches):
    sizes = SimpleNamespace(_num_stages=stages, _n_microbatches=micro_batches)
    for schedule in (ScheduleGPipe, Schedule1F1B):
        first = schedule._get_pipeline_order(sizes)[0]
        held = most = 0
        for action in filter(None, first):
            held += {"FORWARD": 1, "FULL_BACKWARD": -1}.get(action.computation_type.name, 0)
            most = max(most, held)
        name = schedule.__name__.removeprefix("Schedule")
        assert held == 0 and most == chapter["in_flight"](name, stages, micro_batches)


SRUN = """#!/bin/bash
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@"
wait
"""
SAYS = """import json, os
names = "RANK", "WORLD_SIZE", "GROUP_RANK", "ACCELERATE_USE_FSDP"
print("\\n" + json.dumps([os.environ.get(name) for name in names]), flush=True)
"""


@pytest.mark.slow
def test_the_files_of_the_cluster_start_ranks_that_find_each_other(tmp_path):
    """As a cluster of two machines with two ranks each runs them."""
    files = dict(re.findall(r"```(yaml|bash)\n(.*?)```", CHAPTER.text["cluster"], re.DOTALL))
    files = {kind: re.sub(r"\b8\b", "2", text) for kind, text in files.items()}
    settings = files["yaml"].replace("64", "4")
    found = {"accelerate.yaml": settings, "job.sh": files["bash"], "train.py": SAYS, "srun": SRUN}
    found["scontrol"] = "#!/bin/bash\necho 127.0.0.1\necho other\n"
    for name, text in found.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"PATH": path, "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "both"}
    ran = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=os.environ | job, capture_output=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    said = [json.loads(line) for line in ran.stdout.decode().splitlines() if line.strip()]
    assert sorted(said) == [[str(rank), "4", str(rank // 2), "true"] for rank in range(4)]
