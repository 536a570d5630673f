"""Fake tensors are viewed and refused as real ones; a whole step is in test_on_cpu.py."""

import contextlib

import pytest
import torch

from memlab.card.fake_tensors import tensors_without_data


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(6, 4),
        lambda x: x.t(),
        lambda x: x.transpose(0, 1)[1:],
        lambda x: x[2, 1::2],
        lambda x: x[:, None].expand(4, 3, 6),
        lambda x: x.detach(),
        lambda x: x.select(1, 2),
    ],
)
def test_a_view_is_the_one_that_real_tensors_make(view):
    def told(context):
        with context:
            base = torch.empty(4, 6, dtype=torch.float16)
            made = view(base)
            assert made.untyped_storage()._cdata == base.untyped_storage()._cdata
            return made.shape, made.stride(), made.storage_offset(), made.dtype, made.device

    assert told(tensors_without_data()) == told(contextlib.nullcontext())


def test_what_an_operator_refuses_is_raised_and_not_logged_as_well(caplog):
    with tensors_without_data():
        x = torch.ones(4, 80)
        for refused in (lambda: x * torch.ones(4, 32), lambda: x @ x):
            with pytest.raises(RuntimeError):
                refused()
    assert not caplog.records
