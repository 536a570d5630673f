"""What chapter 11 makes of events and of a grid of cases, from ones that are set."""

import pytest

from memlab.book.chapters import dataloader

EVENTS = [
    ("wait", "device", 0, 3), ("copy", "device", 3, 3.5), ("compute", "device", 3.5, 4),
    ("wait", "device", 4, 5), ("copy", "device", 5, 5), ("compute", "device", 5, 6.5),
    ("load", 7, 0, 3), ("load", 7, 3, 5),
]  # fmt: skip


def test_idle_leaves_the_first_wait_out():
    assert dataloader.spent(EVENTS, "wait") == 4
    assert dataloader.idle(EVENTS) == pytest.approx(1 / (1 + 0.5 + 2))


def test_a_run_against_its_schedule():
    row = dataloader.against_schedule({1: EVENTS}, wait=0.1).loc["workers: 1"]
    assert row["measured, s"] == 3.5  # from the first copy to the last step
    # Two batches of one sample: the second is loaded in 0.1 while a step takes 1.
    assert row["predicted, s"] == pytest.approx(2 * 1.0)
