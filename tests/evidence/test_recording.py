"""The grid sent through a machine: killed, limited, refused, and what it keeps."""

import dataclasses
import os
import subprocess
import sys
import time

import psutil
import pytest
from helpers import TINY, TWO, a_run, refused

from memlab import Recipe, models
from memlab.evidence import recording
from memlab.evidence.records import load, save

# As many tokens as a run may have; their attention scores alone are terabytes.
TOO_LARGE = TINY.but(batch_size=2**18, seq_len=1024)


def test_the_least_a_run_takes_is_weights_gradients_and_states():
    recipe, weights = Recipe(model="gpt2"), 124_439_808 * 4
    for optimizer, times in (("adamw_torch", 4), ("sgd", 3), ("adamw_8bit", 2)):
        assert recording.least_bytes(recipe.but(optimizer=optimizer)) == times * weights
    in_backward = recipe.but(step_in_backward=True)  # each gradient is freed before the next
    assert recording.least_bytes(in_backward) == 3 * weights
    adapters = 12 * (768 + 3 * 768) * 4
    lora = recipe.but(lora_rank=1, lora_targets="c_attn")
    assert recording.least_bytes(lora) == weights + 4 * adapters


def test_weights_that_are_drawn_until_they_fit_end_the_question():
    built = models.skeleton("modernbert-base-tiny")
    weights = sum(weight.nbytes for weight in built.parameters())
    assert recording.least_bytes(Recipe("modernbert-base-tiny")) == 4 * weights


def test_what_cannot_fit_is_said_before_it_runs():
    recipe = Recipe(model="gpt2-xl")
    why = recording.cannot_fit(recipe, 15 * 2**30)
    assert "states alone take" in why and "15,360.0 MiB" in why
    assert recording.cannot_fit(recipe, 80 * 2**30) == ""
    assert recording.cannot_fit(recipe, None) == ""
    # A recipe that is wrong in itself is left to the run, which says so.
    assert recording.cannot_fit(recipe.but(lora_rank=10**6), 1) == ""


START = """
import sys
from memlab import Recipe
from memlab.evidence import recording
tiny = Recipe(model="gpt2-tiny", batch_size=1, seq_len=16)
runs = {"one": tiny, "too large": tiny.but(batch_size=2**18, seq_len=1024)}
recording.record("cpu", sys.argv[1], runs, steps=1)
"""


@pytest.mark.slow
def test_a_killed_grid_goes_on_and_loses_nothing(tmp_path):
    """Killed without warning after the first row; the second start runs only the other."""
    command = [sys.executable, "-c", START, str(tmp_path)]
    quiet = os.environ | {"TQDM_DISABLE": "1"}
    process = subprocess.Popen(command, env=quiet)
    try:
        started = time.monotonic()
        while not list(tmp_path.glob("*.json")) and time.monotonic() - started < 300:
            assert process.poll() is None
            time.sleep(0.05)
        children = psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.wait()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    (path,) = tmp_path.glob("*.json")
    before = load(path)
    assert [run.name for run in before] == ["one"]

    runs = {"one": TINY, "too large": TOO_LARGE}
    report = recording.record("cpu", tmp_path, runs, steps=1)
    after = load(path)
    assert [run.name for run in after] == ["one", "too large"]
    assert after[0] == before[0]
    assert (report.kept, report.done) == (["one"], ["too large"])
    assert report.out_of_memory == ["too large"]
    assert after[1].figures == {"out_of_memory": True}
    assert after[0].figures["peak_tensors_bytes"] > 0 and after[0].figures["step_seconds"] > 0
    assert Recipe(**after[0].recipe) == TINY
    assert os.listdir(tmp_path) == [path.name]
    again = path.read_bytes()
    assert recording.record("cpu", tmp_path, runs).done == []
    assert path.read_bytes() == again


def test_a_run_of_another_recipe_is_not_done(tmp_path):
    path = tmp_path / "runs.json"
    save(path, [a_run({"peak_tensors_bytes": 1})])
    assert recording._finished(path, {"one": TWO}) == ["one"]
    assert recording._finished(path, {"one": TWO.but(batch_size=3)}) == []
    other = a_run({"peak_tensors_bytes": 1})
    save(path, [dataclasses.replace(other, recipe=other.recipe | {"colour": "red"})])
    assert recording._finished(path, {"one": TWO}) == []


def test_a_run_has_a_time_limit_and_is_no_record(tmp_path):
    report = recording.record("cpu", tmp_path, {"one": TINY}, run_seconds=0.2)
    assert report.done == [] and list(report.failed) == ["one"]
    assert report.failed["one"].startswith("stopped after")
    assert list(tmp_path.iterdir()) == []


def test_the_whole_has_a_time_limit(tmp_path):
    runs = {"one": TINY, "two": TINY}
    report = recording.record("cpu", tmp_path, runs, limit_seconds=0.2)
    assert (report.done, report.failed, report.left) == ([], {}, ["one", "two"])
    assert "2 left" in str(report)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_is_refused_or_fails_is_said_and_no_record(tmp_path):
    runs = {"refused": TINY.but(lora_rank=10**6)}
    report = recording.record("cpu", tmp_path, runs, steps=1)
    assert "lora_rank is 1000000" in report.skipped["refused"]
    assert report.done == [] and list(tmp_path.iterdir()) == []
    assert "skipped  refused: lora_rank" in str(report)


def test_a_file_that_is_not_whole_is_refused_and_left_alone(tmp_path):
    name = recording.machine(recording.pick_device("cpu"))["device_name"]
    path = recording.file_of(name, tmp_path)
    path.write_text('{"schema": 1, "records": [{"kind": "rec')
    before = path.read_bytes()
    with refused(str(path)):
        recording.record("cpu", tmp_path, {"one": TINY})
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(recording, "machine", lambda device: pytest.fail("work has begun"))
    for out in (tmp_path / "file", tmp_path / "file" / "records"):
        with pytest.raises(OSError):
            recording.record("cpu", out, {})
