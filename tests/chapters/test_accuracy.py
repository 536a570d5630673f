"""The page on accuracy: every file and every run has its row."""

import pytest
from notebook import Notebook

from memlab import find_records
from memlab.book.chapters import accuracy, recorded
from memlab.evidence.loops import kept_predictions
from memlab.evidence.records import FOLDER

PAGE = Notebook("accuracy")


@pytest.fixture(scope="module")
def page():
    return PAGE.run("imports glance-run glance-said")


def test_every_file_of_published_runs_has_its_row():
    files = {file for file, _ in accuracy.REGIMES.values()}
    assert files == {path.name for path in FOLDER.glob("published-*.json")}
    loops = {one.loop for one in find_records("published")} - {"", "fitcheck"}
    assert set(accuracy.OTHERS.values()) < files and len(loops) == len(accuracy.OTHERS)


def test_runs_are_counted_once_and_without_the_one_that_gave_a_length(page):
    said = kept_predictions()["runs"]
    sized = [said[path.name].values() for path in FOLDER.glob("published-*.json")]
    simulated = sum("refused" not in kept for file in sized for kept in file)
    assert len(page["runs"]) == simulated - 1
    assert "allocated" not in set(page["promised"]["figure"])
    assert len(page["new"]) + page["runs"]["old"].sum() == len(page["runs"])


@pytest.mark.parametrize(
    "device", {run.device for run in find_records("recorded") if run.driver is not None}
)
def test_every_recorded_run_of_a_card_has_its_row(device):
    names = {run.name for run in find_records("recorded", device)}
    rows = recorded.runs_of(device)
    assert set(rows.index) == names
    printed = recorded.every_run(rows, device).to_html()
    assert all(name in printed for name in {*names, device})
    kinds = recorded.by_kind(rows, device)
    assert kinds.data["runs"].sum() == len(names) and device in kinds.to_html()
    assert not kinds.data["allocated"].str.contains(r"[+-]0\.00%").any()
