"""Chapter 15: its small training is one training, however its batch is cut."""

import pytest
from notebook import Notebook

CHAPTER = Notebook("15-ablation")


@pytest.fixture(scope="module")
def chapter():
    own = CHAPTER.run("imports settings start small train")
    own["STEPS"] = 6
    return own


def test_switches_that_only_cut_or_repeat_end_where_plain_training_ends(chapter):
    plain = chapter["end_of"]({}, 1)
    for name in ("accumulation", "checkpointing"):
        assert chapter["end_of"](chapter["SWITCHES"][name], 1) == pytest.approx(plain, abs=1e-2)
    assert chapter["end_of"]({}, 2) != pytest.approx(plain, abs=1e-3)
