"""What optimizers hold, where it is counted, and their figures."""

from functools import partial

import pytest
import torch

from memlab import find_records
from memlab.book.chapters import optimizers


def test_states_are_counted_after_a_step_without_the_shared_tables():
    assert optimizers.held_for(torch.optim.AdamW, 64, 64) == pytest.approx(8, abs=0.01)
    momentum = partial(torch.optim.SGD, momentum=0.9)
    assert optimizers.held_for(momentum, 64, 64) == 4


def test_the_distance_is_a_share_of_the_others_way():
    start = optimizers.weights_after(torch.optim.SGD, lr=0.0)
    gone = optimizers.weights_after(torch.optim.SGD, lr=1e-2)
    assert optimizers.apart(gone, gone) == 0
    assert optimizers.apart(start, gone) == pytest.approx(1)


def test_the_trainer_trains_with_the_optimizer_of_that_name():
    model, made = optimizers.trained_by_trainer("adafactor")
    assert type(made).__name__ == "Adafactor" and optimizers.state_bytes(made) < 0.5
    assert len(made.state) == len(list(model.parameters()))


def test_published_savings_are_the_differences_of_the_printed_bytes():
    frame = optimizers.published_savings()
    assert frame["saved"]["vanilla"] == 0 and 7.5 < frame["saved"]["adafactor"] < 8.5
    assert 5 < frame["saved"]["8-bit adam"] < 6.1
    seconds = {run.name: run.figures.get("run_seconds") for run in find_records("published")}
    assert all(frame["run_seconds"][name] == seconds[name] for name in frame.index)


def test_the_step_in_backward_saved_less_than_the_gradients():
    without, within, gradients = optimizers.torchtune_in_backward()
    assert within < without < within + gradients
