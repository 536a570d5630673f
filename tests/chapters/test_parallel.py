"""Chapter 17 and the page below it: arithmetic, ranks, mixtures, and the verdict."""

import pytest
from notebook import Notebook

from memlab.models import active_parameters

CHAPTER, DEEPER = Notebook("17-parallel"), Notebook("17-parallel-deeper")


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run("imports bytes pipeline-bubble")


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports moe-models moe-judged")


def test_the_arithmetic_is_that_of_the_paper(chapter):
    said = [7.5 * chapter["bytes_a_parameter"](way, 64) for way in ("ddp", "zero1", "zero2")]
    assert said == pytest.approx([120, 31.4, 16.6], rel=0.01)
    assert chapter["bytes_a_parameter"]("zero3", 16) == 1


def test_ranks_learn_what_one_process_learns_and_hold_what_is_simulated(chapter):
    CHAPTER.run("folder program program-main run simulated-rank compare compare-said", chapter)
    assert chapter["losses"]["one process"][0] > chapter["losses"]["one process"][-1]
    assert chapter["rows"]["FSDP2, parameters"]["difference, bytes"] == 0


def test_the_launch_that_does_not_shard_is_seen(deeper):
    DEEPER.run("folder silent-program silent-files silent-run silent-said", deeper)
    said = [one["check_split"] for one in deeper["found"]]
    assert said == [said[0]] * 2 and "holds 4,160 of 4,160 weights" in said[0]


def test_active_parameters_are_those_of_a_dense_model_and_the_routers(deeper):
    dense = deeper["mixture"](1, active=1, width=256)
    total, active = active_parameters(deeper["mixture"](8))
    alone = active_parameters(dense)
    routers = 2 * 64 * (8 - 1)  # of two layers; the dense model has one expert to choose from
    assert alone[0] == alone[1] == active - routers
    assert total - active == 2 * 6 * 3 * 64 * 128  # six idle experts of three matrices


def test_the_stages_of_a_pipeline_wait_less_with_more_micro_batches(chapter):
    bubble = chapter["bubble"]
    assert bubble(4, 1) == 3 / 4 and bubble(8, 64) < 0.1 <= bubble(8, 63) and bubble(1, 5) == 0


@pytest.mark.parametrize("number, wrong", [(1, 120), (2, 63), (3, 4160)])
def test_an_exercise_knows_right_from_wrong(chapter, capsys, number, wrong):
    CHAPTER.run("buggy", chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


@pytest.mark.parametrize(
    "grown, worked, word",
    [
        ([3.6, 14], [1, 1], "holds with a condition"),
        ([9, 14], [1, 1], "holds"),
        ([3.6, 14], [1, 2], "does not hold"),
        ([2, 3], [1, 1], "does not hold"),
    ],
)
def test_the_verdict_follows_the_figures(chapter, grown, worked, word):
    source = CHAPTER.code["verdict-b27"].replace("verdict(", "decided = verdict(")
    exec(source, names := chapter | {"grown": grown, "worked": worked})
    assert names["decided"].word == word
