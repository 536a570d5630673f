"""Chapter 15: its small training is one training, however its batch is cut."""

import pytest
from notebook import Notebook

CHAPTER = Notebook("15-ablation")


@pytest.fixture(scope="module")
def chapter():
    own = CHAPTER.run("imports settings start small train pruning-function")
    own["STEPS"] = 6
    return own


def test_switches_that_only_cut_or_repeat_end_where_plain_training_ends(chapter):
    plain = chapter["end_of"]({}, 1)
    for name in ("accumulation", "checkpointing"):
        assert chapter["end_of"](chapter["SWITCHES"][name], 1) == pytest.approx(plain, abs=1e-2)
    assert chapter["end_of"]({}, 2) != pytest.approx(plain, abs=1e-3)


def test_pruning_masks_half_of_each_matrix_but_the_heads(chapter):
    model = chapter["models"].build(chapter["config"])
    chapter["prune_half"](model)
    masks = dict(model.named_buffers())
    masks = {name: mask for name, mask in masks.items() if name.endswith("weight_mask")}
    assert len(masks) == 7 and not any("head" in name for name in masks)
    assert all(mask.mean() == 0.5 for mask in masks.values())
