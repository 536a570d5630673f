"""The page on accuracy: its counts are those of the records, its tables what they say they are."""

import re

import pytest
from notebook import Notebook

from memlab import find_records
from memlab.card.kernels.rules import RULES
from memlab.card.step_time import BEST, EXPECTED, WORST
from memlab.evidence.effects import BLOCKS, LIBRARIES
from memlab.evidence.loops import assumptions, kept_predictions
from memlab.evidence.records import FOLDER

PAGE = Notebook("accuracy")


@pytest.fixture(scope="module")
def page():
    return PAGE.run("imports glance-run glance-table glance-blind glance-said")


def test_every_file_of_published_runs_has_its_row(page):
    files = {file for file, _ in page["REGIMES"].values()}
    assert files == {path.name for path in FOLDER.glob("published-*.json")}
    loops = {one.loop for one in find_records("published")} - {"", "fitcheck"}
    PAGE.run("others-run", page)
    assert {page["groups"][name] for name in page["groups"]} < files
    assert len(loops) == len(page["groups"])


def test_runs_are_counted_once_and_without_the_one_that_gave_a_length(page):
    said = kept_predictions()["runs"]
    sized = [said[path.name].values() for path in FOLDER.glob("published-*.json")]
    simulated = sum("refused" not in kept for file in sized for kept in file)
    assert len(page["runs"]) == simulated - 1
    assert "allocated" not in set(page["promised"]["figure"])
    assert len(page["new"]) + page["runs"]["old"].sum() == len(page["runs"])


def test_the_blind_sample_is_that_of_the_twelve_questions(page):
    deeper = Notebook("16-planner-deeper").run("imports load")
    called = [
        fitted
        for (*_, fitted), answer in zip(deeper["tries"], deeper["answers"], strict=True)
        if answer["fits"]
    ]
    assert len(page["blind"]) == len(called) and sum(page["blind"]) == sum(called)


def test_a_card_is_verified_by_its_own_runs_alone(page):
    assert not {"L4", "RTX-4090", "A100-40GB"} & set(page["met"])
    assert {"L40S", "T4", "V100", "A100-80GB", "H100"} <= set(page["met"])


def test_the_nine_runs_have_the_figure_of_the_chapters(page):
    """Reserved, as simulated, and the context that the guide printed: one figure a run."""
    PAGE.run("nine-run nine-table nine-said", page)  # asserts
    said = page["kept"]["runs"]["published-source-001.json"]
    for run, label in zip(page["published"], page["names"], strict=True):
        used = said[run.name]["peak_reserved_bytes"] + run.figures["context_bytes"]
        assert page["nine"]["simulated"][label] == used / 2**20
    assert [name for name in page["nine"] if name.startswith("error")] == ["error"]


def test_each_rule_stands_with_its_source():
    rules = RULES | {"workspaces": LIBRARIES, "rounding": BLOCKS}
    listed = [line for line in PAGE.text["rules-said"].splitlines() if line.startswith("- ")]
    assert listed == [f"- {rule}: {source}" for rule, source in rules.items()]


def test_what_was_assumed_is_what_the_loops_say():
    """One text in two places: a loop's module wraps its lines, the page does not."""
    titles = {
        "PEFT's comparison": "PEFT's comparison",
        "torchtune's ladder": "torchtune",
        "torch-preflight's calibration": "torch-preflight",
        "torchtitan's ranks": "torchtitan",
    }
    parts = [f"**{title}**\n\n{assumptions(loop)}" for title, loop in titles.items()]
    told = " ".join(["What was assumed:", *parts])
    assert PAGE.text["others-assumptions"].split() == told.split()


def test_shares_of_the_data_sheet_are_printed_as_they_are(page):
    source = PAGE.code["seconds-assumed"].replace("assumed.style", "shown = assumed.style")
    exec(source, page)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page["shown"].to_html())
    columns = [vars(reach).values() for reach in (BEST, EXPECTED, WORST)]
    wanted = [one for row in zip(*columns, strict=True) for one in row]
    assert len(cells) == len(wanted) == 3 * 9  # five shares, a count and three times
    for printed, one in zip(cells, wanted, strict=True):
        assert float(printed) == one or float(printed) == pytest.approx(one * 1e6)


def test_every_file_with_seconds_has_its_row(page):
    PAGE.run("seconds-run seconds-table", page)
    assert set(page["timed"]) == set(page["SOURCES"].values()) == set(page["by_source"].index)


def test_seconds_are_as_close_as_is_told(page):
    """The bounds that the estimates are held to, on what others have published."""
    PAGE.run("seconds-run seconds-table seconds-said", page)
    table = page["by_source"]
    assert page["sizes"].median() < 0.15 and page["inside"] >= 0.9
    assert page["mean"] < 0.10  # NeuSight's passes
    known = ["Llama 2 7B, 2 GeForce cards", "Llama 3.1 8B, FSDP, H100"]  # as the text says
    assert (table["size"].drop(known) < 0.15).all()
    assert table["ratios"].median() < 0.08
