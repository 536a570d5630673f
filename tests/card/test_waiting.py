"""Loops that wait for values which only a real card has."""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from helpers import refused

from memlab.card.placement import NotSimulated

LARGE = 600  # a matrix of these, on the host, has no data


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("bounds", [{}, dict(a=-0.04, b=0.04), dict(a=0.03, b=0.04)])
def test_truncated_normal_numbers_are_drawn(gpu, device, bounds):
    weight = torch.empty(LARGE, LARGE, device=device)
    assert torch.nn.init.trunc_normal_(weight, std=0.02, **bounds) is weight
    assert gpu.footprint.peak_allocated <= 6 * weight.nbytes
    # How often numbers are drawn anew is no matter of bytes, and nobody needs to read it.
    assert gpu.footprint.assumptions == ()


def rejection(x):
    sample = torch.randn_like(x)
    while True:
        bad = sample.abs() > 0.5
        if not bad.any():
            return sample
        sample = torch.where(bad, torch.randn_like(x), sample)


def done_flags(x):
    done = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    while not done.all():
        done = done | (x.mean(1) > 2)


def convergence(x):
    error = x.norm()
    while error > 1e-6:
        x = x / 2
        error = x.norm()


def convergence_on_the_host(x):
    while float(x.norm().cpu().numpy()) > 1e-6:
        x = x / 2


class Chain:
    """A reading in a function of its own."""

    def finished(self, x):
        return bool((x.max() > 100).any())

    def __call__(self, x):
        while not self.finished(x):
            x = x + 1


def after_a_loop_that_catches(x):
    """Python 3.13 moves its handler to the end, from where it jumps back to the first loop."""

    def finished():
        for text in "12":
            try:
                int(text)
            except ValueError:
                continue
        return bool(x.norm() < 1e-6)

    while not finished():
        x = x / 2


WAITING = [rejection, done_flags, convergence, convergence_on_the_host, after_a_loop_that_catches]
WAITING += [Chain()]


@pytest.mark.parametrize("loop", WAITING, ids=lambda one: getattr(one, "__name__", "Chain"))
def test_a_loop_that_waits_is_given_another_answer_and_that_is_said(on_card, loop):
    loop(torch.randn(8, 8))
    assert on_card.footprint.assumptions
    for said in on_card.footprint.assumptions:
        assert said.startswith("test_waiting.py:") and "times, then" in said


def test_a_loop_that_nothing_ends_is_refused_with_its_line(on_card):
    x = torch.randn(4)
    with refused(r"the while loop at test_waiting.py:\d+", kind=NotSimulated):
        while x.sum().item() != 0.25:
            x = x + 1


def test_a_count_in_the_loop_does_not_make_it_endless(on_card, monkeypatch):
    monkeypatch.setattr("memlab.card.waiting.MOST", 300)
    x, count = torch.randn(4), 0
    with refused("read 301 times", kind=NotSimulated):
        while x.sum() > 1e-3:
            count += 1
    assert 300 <= count <= 301  # the first reading has a place of its own


def test_a_training_loop_is_not_disturbed(on_card):
    def train(steps):
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:  # bounded by the optimizer's steps, not by a number here
            loss = model(torch.randn(2, 8)).mean()
            assert loss.item() == 1
            if not torch.isfinite(loss):
                raise AssertionError("the loss is finite")
            loss.backward()
            optimizer.step()
            if next(steps) == 50:
                return

    train(itertools.count())
    for _ in range(50):
        assert not (torch.randn(4) > 2).any()
    lengths = torch.ones(1, 1, dtype=torch.long)
    while lengths.size(1) < 50:  # generating: the sequence grows
        assert not (torch.randn(4).argmax() == 5)
        lengths = torch.cat([lengths, lengths[:, :1]], 1)
    assert on_card.footprint.assumptions == ()


def some_gradients(count=30):
    return [torch.randn(4) for _ in range(count)]


def are_finite(gradients):
    return all(torch.isfinite(gradient).all() for gradient in gradients)


def have_no_nan(gradients):
    return not any((gradient != gradient).any() for gradient in gradients)


def are_finite_in_place(gradients):
    fine = torch.isfinite(gradients[0])
    for gradient in gradients:
        fine &= torch.isfinite(gradient)
    return bool(fine.all())


@pytest.mark.parametrize("check", [are_finite, have_no_nan, are_finite_in_place])
def test_what_follows_from_numbers_being_finite_is_never_flipped(on_card, check):
    turns = 0
    while turns < 3:
        assert check(some_gradients())
        turns += 1
    waits = torch.isnan(torch.randn(4))
    waits |= torch.randn(4) > 2
    assert on_card.footprint.assumptions == ()
    while not waits.all():
        waits = waits | (torch.randn(4) > 2)
    assert len(on_card.footprint.assumptions) == 1


READERS = {
    "generator": lambda tensors: all(x.norm() < 10 for x in tensors),
    "largest": lambda tensors: max(x.norm() for x in tensors) < 10,
}


@pytest.mark.parametrize("reads", READERS)
def test_many_readings_in_one_turn_of_a_loop_count_as_one(on_card, reads):
    again, turns = True, 0
    while again:
        assert READERS[reads](some_gradients())
        turns += 1
        again = turns < 3
    assert on_card.footprint.assumptions == ()


def test_a_loop_that_reads_many_tensors_a_turn_is_given_another_answer_for_all(on_card):
    tensors = some_gradients(3)
    while any(x.norm() > 0.5 for x in tensors):
        tensors = [x / 2 for x in tensors]
    assert len(on_card.footprint.assumptions) == 1


def test_each_call_waits_anew(on_card):
    def halve(x):
        while x.norm() > 2:
            x = x / 2
        return x

    x = torch.randn(4)
    for _ in range(50):
        halve(x)
    assert on_card.footprint.assumptions == ()


def test_looking_at_a_loop_keeps_nothing_alive(on_card):
    def loop(x, mine):
        values = locals() if mine else None
        gone = torch.ones(4)
        seen = weakref.ref(gone.untyped_storage())
        for again in (True, False):
            while again and x.norm() > 0:
                if not again:
                    break
                again = x.norm() < 0
        del gone
        gc.collect()
        assert mine or seen() is None
        assert not mine or values["mine"] is True

    loop(torch.randn(4), False)
    loop(torch.randn(4), True)


@pytest.mark.parametrize("where", ["host", "context", "default"])
def test_layers_are_drawn_wherever_they_are_made(t4, where):
    if where == "default":
        torch.set_default_device("cuda")
    try:
        with torch.device("cuda") if where == "context" else contextlib.nullcontext():
            model = torch.nn.Linear(512, 2048)  # 4 MiB, without data on the host
            torch.nn.init.trunc_normal_(
                model.weight.data.normal_(std=0.02), std=0.02, a=-2.0, b=2.0
            )
    finally:
        torch.set_default_device(None)
    model.to("cuda")
    assert torch.cuda.memory_allocated() == 4 * (512 + 1) * 2048
    assert t4.footprint.assumptions == ()


def test_code_that_runs_once_does_not_wait_whatever_ran_before_it(gpu):
    """As the cells of a notebook do: Python uses the addresses of code that is gone again."""
    loss, read = torch.randn(4, device="cuda").sum(), []
    for _ in range(90):
        cell = compile("done = False\nwhile not done: note(loss.item()); done = True", "", "exec")
        exec(cell, {"loss": loss, "note": read.append})
    assert read == [1.0] * 90
