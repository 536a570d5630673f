"""What optimizers hold, where it is counted, and their figures."""

from functools import partial

import pytest
import torch

from memlab.book.chapters import optimizers


def test_states_are_counted_after_a_step_without_the_shared_tables():
    assert optimizers.held_for(torch.optim.AdamW, 64, 64) == pytest.approx(8, abs=0.01)
    momentum = partial(torch.optim.SGD, momentum=0.9)
    assert optimizers.held_for(momentum, 64, 64) == 4
