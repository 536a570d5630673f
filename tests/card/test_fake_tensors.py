"""Fake tensors are refused as real ones; a whole step is in test_on_cpu.py."""

import pytest
import torch

from memlab.card.fake_tensors import tensors_without_data


def test_what_an_operator_refuses_is_raised_and_not_logged_as_well(caplog):
    with tensors_without_data():
        x = torch.ones(4, 80)
        for refused in (lambda: x * torch.ones(4, 32), lambda: x @ x):
            with pytest.raises(RuntimeError):
                refused()
    assert not caplog.records
