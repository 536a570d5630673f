"""A record of a card that hangs together passes; a figure that does not belong to it shows."""

import dataclasses
import json
import sys

import pytest
import standin_card
from helpers import TINY

from memlab.cli import main
from memlab.evidence import recording, worker
from memlab.evidence.plausibility import doubts
from memlab.evidence.records import FOLDER, find_records, load, save

RUNS = {"one": TINY.but(batch_size=4, accumulation=2, precision="fp16-amp")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What `record` writes on a stand-in for a T4, in processes of its own."""
    folder = tmp_path_factory.mktemp("records")
    command = [sys.executable, standin_card.__file__, "T4", "worker"]
    with pytest.MonkeyPatch.context() as patch, standin_card.stand_in("T4"):
        patch.setattr(worker, "COMMAND", command)
        report = recording.record("cuda", folder, RUNS, steps=2, note="a stand-in")
    assert report.done == list(RUNS)
    # The one thing that only a driver says.
    return [dataclasses.replace(run, driver="580.95") for run in load(report.path)]


def test_a_card_that_was_recorded_is_not_doubted(recorded):
    assert [doubts(run) for run in recorded] == [[]]
    assert all(run.source.endswith("; a stand-in") for run in recorded)
    assert {run.device for run in recorded} == {"Tesla T4"}
    for figures in (run.figures for run in recorded):
        assert figures["context_bytes"] < figures["device_used_bytes"]


@pytest.mark.parametrize(
    ("figure", "change", "says"),
    [
        ("peak_allocated_bytes", lambda size: size + 100, "not a multiple of 512"),
        ("peak_reserved_bytes", lambda size: size + 512, "not a multiple of 2,097,152"),
        ("device_used_bytes", lambda size: size + 2**30, "more than peak_reserved plus a context"),
        ("total_memory_bytes", lambda size: 2 * size, "total_memory is"),
        ("step_seconds", lambda seconds: 1000 * seconds, "allowed are three in rising order"),
        ("samples_per_second", lambda speed: 2 * speed, "which is not "),
    ],
)
def test_a_wrong_figure_shows(recorded, figure, change, says):
    for run in recorded:
        wrong = run.figures | {figure: change(run.figures[figure])}
        (found,) = doubts(dataclasses.replace(run, figures=wrong))
        assert says in found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device": "Tesla T5"}, "not a card that memlab knows"),
        ({"driver": None}, "driver is null"),
        ({"date": "2999-01-01"}, "which is in the future"),
        ({"figures": {"step_seconds": 1.0}}, "no total_memory_bytes"),
    ],
)
def test_what_is_missing_or_unknown_shows(recorded, change, says):
    assert any(says in doubt for doubt in doubts(dataclasses.replace(recorded[0], **change)))


def test_the_command_says_what_is_doubtful(recorded, tmp_path, capsys):
    path = tmp_path / "tesla-t4.json"
    save(path, recorded)
    assert main(["record", "--check", str(path)]) == 0
    assert "1 record, nothing doubtful" in capsys.readouterr().out
    figures = recorded[0].figures
    for wrong, says in (
        ({"peak_allocated_bytes": figures["peak_allocated_bytes"] // 1024 * 512}, "the simulation"),
        ({name: value / 1000 for name, value in figures.items() if "step_" in name}
         | {"samples_per_second": 1000 * figures["samples_per_second"]}, "the estimate"),
    ):  # fmt: skip
        save(path, [dataclasses.replace(recorded[0], figures=figures | wrong)])
        assert main(["record", "--check", str(path), "--json"]) == 1
        (found,) = json.loads(capsys.readouterr().out)["doubts"]
        assert says in found
    strange = recorded[0].recipe | {"colour": "red"}
    save(path, [dataclasses.replace(recorded[0], recipe=strange)])
    assert main(["record", "--check", str(path)]) == 1
    assert "unexpected keyword argument 'colour'" in capsys.readouterr().out
    save(path, [dataclasses.replace(recorded[0], device="CPU (x86_64, 2 threads)")])
    assert main(["record", "--check", str(path)]) == 2
    assert "has records of a CPU" in capsys.readouterr().err


def test_every_card_in_the_package_is_plausible():
    for run in find_records("recorded"):
        assert run.device.startswith("CPU") or doubts(run) == [], run.name
    for path in FOLDER.glob("*.json"):
        kinds = {run.kind for run in load(path)}
        assert kinds == {"published" if path.name.startswith("published") else "recorded"}
