"""What chapter 11 makes of events and of a grid of cases, from ones that are set."""

import pytest
import torch

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


def test_lanes_are_drawn_by_process():
    dataloader.draw_lanes({0: EVENTS, 1: EVENTS})
    from matplotlib import pyplot as plt

    axes = plt.gcf().axes
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["device", "worker"]
    assert axes[0].get_title(loc="left") == "workers: 0, device idle 29%"
    plt.close("all")


class Stub:
    def __call__(self, text):
        return {"input_ids": [1] * 600}

    def decode(self, ids):
        return "word " * len(ids)


class Known(dataloader.Grid):
    def busy_share(self, kind, ratio, workers):
        return 1 / (1 + ratio) if not workers else 0.5


def test_the_grid_predicts_from_the_run_without_workers():
    grid = Known(load=None).run()
    assert grid.control == 0 and set(grid.busy) == set(grid.cases)
    assert grid.predicted("waiting", 3, 0) == 0.25
    assert grid.predicted("waiting", 8, 2) == pytest.approx(2 / 8)
    assert grid.predicted("waiting", 3, 4) == 1  # four workers keep up with three steps
    assert grid.predicted("work, 1 core", 2, 4) == pytest.approx(0.5)  # one core does no more


def test_a_case_of_the_grid_is_a_share():
    def load(data, workers, **how):
        return torch.utils.data.DataLoader(data, batch_size=how["batch_size"])

    assert 0.1 < dataloader.Grid(load).busy_share("waiting", 1, 0) < 0.9


def test_costs_are_seconds_of_the_processor():
    found = dataloader.costs(Stub(), ["some words"] * 9)
    assert list(found)[0] == "ready ids" and all(cost >= 0 for cost in found.values())
