"""Ranks that are started here and end whatever happens, and what starts them elsewhere."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from helpers import one_line

from memlab import Recipe
from memlab.export.launchers import (
    RanksFailed,
    _objects,
    accelerate_config,
    run_ranks,
    slurm_script,
)

RECIPE = Recipe("llama-3-8b-tiny", ranks=4, sharding="zero3", precision="bf16-amp")


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "rank.py"
        path.write_text(f"import json, os, sys, time\n{text}")
        return path

    return write


def test_every_rank_says_who_it_is(script):
    said = 'print(json.dumps({"rank": int(os.environ["RANK"]), "of": os.environ["WORLD_SIZE"]}))'
    assert run_ranks(script(said), 2) == [{"rank": 0, "of": "2"}, {"rank": 1, "of": "2"}]


def test_a_rank_that_fails_ends_the_others_and_is_named(script):
    began = time.monotonic()
    fails = 'if os.environ["RANK"] == "1":\n    raise ValueError("no such file")\ntime.sleep(300)'
    with pytest.raises(RanksFailed, match="ValueError: no such file") as error:
        run_ranks(script(fails), 2)
    one_line(error)
    assert time.monotonic() - began < 100


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_that_is_killed_is_named(script):
    with pytest.raises(RanksFailed, match="exitcode: -9|exitcode  : -9|-9") as error:
        run_ranks(script('if os.environ["RANK"] == "1":\n    os.kill(os.getpid(), 9)'), 2)
    one_line(error)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", ["time", "interrupt"])
def test_no_rank_outlives_its_time_or_an_interrupt(script, tmp_path, end, monkeypatch):
    path = script(f"open('{tmp_path}/' + str(os.getpid()) + '.pid', 'w')\ntime.sleep(300)")
    expected, seconds = RanksFailed, 12
    if end == "interrupt":
        expected = KeyboardInterrupt
        ask = subprocess.Popen.communicate
        waited = []

        def interrupted(process, timeout=None):
            if timeout and not waited:
                waited.append(time.sleep(8))
                raise KeyboardInterrupt
            return ask(process, timeout=timeout)

        monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(expected):
        run_ranks(path, 2, seconds=seconds)
    pids = [int(one.stem) for one in tmp_path.glob("*.pid")]
    assert len(pids) == 2 and not any(map(alive, pids))


def test_slurm_takes_the_script(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(slurm_script(RECIPE, machines=2, script="my train.py"))
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert "--nodes=2" in path.read_text() and "--nproc-per-node=2" in path.read_text()
    assert "'my train.py'" in path.read_text()
    assert "PYTORCH_ALLOC_CONF" not in path.read_text()
    path.write_text(slurm_script(RECIPE.but(expandable_segments=True), machines=2))
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    said = "export PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert path.read_text().index(said) < path.read_text().index("srun")


SRUN = """#!/bin/bash
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@"
wait
"""
SAYS = """import json, os
names = "RANK", "WORLD_SIZE", "GROUP_RANK", "ACCELERATE_USE_FSDP"
print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [None, "my accelerate.yaml"])
def test_the_ranks_of_two_machines_find_each_other(tmp_path, config):
    """The script as a cluster of two runs it; torchrun passes over what the YAML asks for."""
    (tmp_path / "my accelerate.yaml").write_text(accelerate_config(RECIPE, machines=2))
    (tmp_path / "my train.py").write_text(SAYS)
    (tmp_path / "job.sh").write_text(slurm_script(RECIPE, 2, "my train.py", config=config))
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1\necho other\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"PATH": path, "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "both"}
    ran = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=os.environ | job, capture_output=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    said = _objects(ran.stdout.decode())
    assert sorted(one["RANK"] for one in said) == ["0", "1", "2", "3"]
    assert {one["WORLD_SIZE"] for one in said} == {"4"}
    assert sorted(one["GROUP_RANK"] for one in said) == ["0", "0", "1", "1"]  # two a machine
    assert {one["ACCELERATE_USE_FSDP"] for one in said} == {"true" if config else None}


@pytest.mark.parametrize("sharding, kind", [("ddp", "MULTI_GPU"), ("zero2", "FSDP")])
def test_accelerate_takes_the_file(tmp_path, sharding, kind):
    path = tmp_path / "config.yaml"
    path.write_text(accelerate_config(RECIPE.but(sharding=sharding), machines=2))
    read = load_config_from_file(str(path))
    assert read.distributed_type == kind and read.num_processes == 4 and read.num_machines == 2
    assert read.mixed_precision == "bf16"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path, "--help"]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_the_layers_of_the_model_are_named():
    values = yaml.safe_load(accelerate_config(RECIPE))["fsdp_config"]
    assert values["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    assert values["fsdp_reshard_after_forward"] is True


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: slurm_script(RECIPE, 3), "ranks is 4: allowed are multiples of 3 machines"),
        (lambda: slurm_script(RECIPE, 0), "machines is 0"),
        (lambda: accelerate_config(RECIPE.but(sharding="zero1")), "sharding is 'zero1'"),
        (lambda: run_ranks("train.py", 0), "ranks is 0: allowed are whole numbers from 1"),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line(ask, said):
    with pytest.raises(ValueError) as error:
        ask()
    assert said in one_line(error)
