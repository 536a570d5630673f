"""Results that are known from a call of the same kind are those that PyTorch works out."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memlab.card.fake_tensors import NoData, tensors_without_data

aten = torch.ops.aten
HALF, WHOLE = torch.float16, torch.float32
# What is called, and the arguments: a shape and a dtype stand for a tensor.
CALLS = {
    "a sum": (aten.add.Tensor, ([4, 8], HALF), ([8], WHOLE)),
    "a sum with a whole number": (aten.add.Tensor, ([4, 8], torch.int64), 1),
    "a sum with a fraction": (aten.add.Tensor, ([4, 8], torch.int64), 1.0),
    "a list": (aten.cat.default, [([4, 8], HALF), ([4, 2], HALF)], 1),
    "several results": (
        aten.native_layer_norm.default,
        ([4, 8], HALF),
        [8],
        ([8], HALF),
        None,
        1e-5,
    ),
    "a softmax": (aten._softmax.default, ([4, 8], HALF), 1, False),
}


def call(mode, func, *args, **kwargs):
    """What an operator gives for tensors of these kinds."""

    def made(value):
        if isinstance(value, tuple):
            meta = torch.empty(value[0], dtype=value[1], device="meta")
            return FakeTensor(mode, meta, torch.device("cpu"))
        return [made(one) for one in value] if isinstance(value, list) else value

    given = [made(value) for value in args]
    with mode:
        return func(*given, **kwargs)


def flat(result):
    return result if isinstance(result, (tuple, list)) else [result]


def kinds(result):
    return [
        (one.shape, one.stride(), one.dtype, one.storage_offset(), one.untyped_storage().nbytes())
        for one in flat(result)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_gives_what_pytorch_gives(name, monkeypatch):
    mode, asked = NoData(allow_non_fake_inputs=True), []
    dispatch = NoData.dispatch
    monkeypatch.setattr(NoData, "dispatch", lambda *a: asked.append(a[1]) or dispatch(*a))
    first, second = (call(mode, *CALLS[name]) for _ in range(2))
    assert kinds(first) == kinds(second) == kinds(call(FakeTensorMode(), *CALLS[name]))
    assert asked.count(CALLS[name][0]) == 1
    for one, other in zip(*map(flat, (first, second)), strict=True):
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_calls_of_other_kinds_are_told_apart():
    mode = NoData(allow_non_fake_inputs=True)
    whole = [4, 8], torch.int64
    found = [call(mode, aten.add.Tensor, whole, number).dtype for number in (1, 1.0, True, 1)]
    assert found == [torch.int64, WHOLE, torch.int64, torch.int64]
    with mode:
        wide = torch.empty(4, 8)
        assert (wide + wide).stride() == (8, 1)
        assert (wide.t() + wide.t()).stride() == (1, 8)
        assert wide.to(HALF).dtype == HALF and wide.to(torch.float64).dtype == torch.float64
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.true_divide(torch.ones(4, dtype=torch.int64), 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(WHOLE)
        assert torch.true_divide(torch.ones(4, dtype=torch.int64), 2).dtype == WHOLE


def test_what_shares_memory_is_no_new_tensor():
    with NoData(allow_non_fake_inputs=True):
        for _ in range(2):
            whole = torch.empty(4, 8)
            turned, wide = whole.t().transpose(0, 1), whole[None].expand(3, 4, 8)
            parts = whole.view(8, 4), turned, wide, whole.split(2)[1], whole.add_(1)
            for part in (*parts, whole[:, 1::2], whole[:, 1], whole.detach()):
                assert part.untyped_storage()._cdata == whole.untyped_storage()._cdata


def test_numbers_that_pytorch_knows_are_each_worked_out():
    with NoData(allow_non_fake_inputs=True):
        constants = [torch.tensor([number]) for number in (2.0, 3.0)]
        sums = [(one + one).constant for one in constants]
    assert [one.item() for one in sums] == [4.0, 6.0]


def test_an_error_is_raised_each_time_and_not_logged_as_well(caplog):
    with tensors_without_data():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broadcast"):
                torch.empty(4, 8) + torch.empty(3)
    assert not caplog.records
