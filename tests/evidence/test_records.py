"""Recorded and published runs: one schema, whole files, the nine runs of the source."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from helpers import refused

from memlab.evidence.records import Record, find_records, load, save

GOOD = Record(
    kind="recorded",
    name="one",
    recipe={"model": "bert-base", "batch_size": 2, "set_to_none": True, "task": None},
    figures={"peak_allocated_bytes": 1024, "step_seconds": 0.5, "samples_per_second": 4.0},
    device="NVIDIA L4",
    driver=None,
    versions={"torch": "2.13.0"},
    date="2026-11-20",
    source="commit 0123abc",
)


def test_selection():
    assert len(find_records(optimizer="adafactor", device="V100")) == 2
    (run,) = find_records(precision="fp16-amp", checkpointing="none", device="V100")
    assert run.name == "fp16"
    assert find_records(device="no such card") == []
    assert find_records(no_such_field=1) == []
    assert find_records(kind="recorded", model="bert-large", device="V100") == []


def test_round_trip(tmp_path):
    other = dataclasses.replace(GOOD, name="two", figures={"out_of_memory": True})
    path = tmp_path / "new" / "runs.json"
    save(path, [GOOD, other])
    assert load(path) == [GOOD, other]
    assert find_records(folder=path.parent, model="bert-base") == [GOOD, other]
    assert os.listdir(path.parent) == ["runs.json"]


def test_interrupted_writing_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "runs.json"
    save(path, [GOOD])
    before = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    for moment in ("write_bytes", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, moment, interrupt)
            with pytest.raises(KeyboardInterrupt):
                save(path, [dataclasses.replace(GOOD, name="new")])
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["runs.json"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kind", "guessed", "allowed are recorded, published"),
        ("device", None, "device is None"),
        ("figures", {}, "figures is {}"),
        ("figures", {"peak": 3}, "'peak' has no unit"),
        ("figures", {"peak_bytes": -1}, "peak_bytes is -1"),
        ("figures", {"step_seconds": float("nan")}, "step_seconds is nan"),
        ("figures", {"out_of_memory": 1}, "out_of_memory is 1"),
        ("date", "January 2022", "date is 'January 2022'"),
    ],
)
def test_a_field_that_does_not_hold_what_it_should(field, value, says):
    with refused(says):
        dataclasses.replace(GOOD, **{field: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: "{", "not a readable JSON file"),
        (lambda content: {"schema": 1}, "a list named records"),
        (lambda content: content | {"schema": 2}, "schema is 2: allowed is 1"),
        (
            lambda content: content["records"][1].pop("date") and content,
            "1 required positional argument: .date.$",
        ),
        (
            lambda content: content["records"][0].update(gpu="x") or content,
            "unexpected keyword .*gpu",
        ),
        (lambda content: content["records"][1].update(name="one") or content, "'one'"),
    ],
)
def test_corrupt_file(tmp_path, change, says):
    path = tmp_path / "runs.json"
    save(path, [GOOD, dataclasses.replace(GOOD, name="two")])
    content = change(json.loads(path.read_text()))
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with refused(str(path), says):
        load(path)


def test_no_file_and_unknown_kind(tmp_path):
    with refused("no such file"):
        load(tmp_path / "none.json")
    with refused("allowed are recorded, published"):
        find_records(kind="measured")
