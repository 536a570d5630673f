"""Two functions at once: the second in a process of its own."""

import os
import signal
import threading
import time

import pytest
import torch

from memlab import processes
from memlab.processes import at_once, map_at_once

forks = pytest.mark.skipif(not processes._forks(), reason="needs Linux and two cores")


@forks
def test_each_has_its_process():
    here, there = at_once(os.getpid, os.getpid)
    assert here == os.getpid() != there


def test_the_last_of_several_has_the_other_process():
    assert map_at_once(lambda n: n * n, [1, 2, 3]) == [1, 4, 9]
    assert map_at_once(lambda n: n * n, [2]) == [4]
    processes_of = map_at_once(lambda _: os.getpid(), range(3))
    assert len(set(processes_of)) == 1 + processes._forks()
    assert processes_of[0] == processes_of[1] == os.getpid()


@forks
def test_there_are_two_processes_and_no_more():
    here, there = at_once(lambda: map_at_once(lambda _: os.getpid(), range(2)), os.getpid)
    assert here == [os.getpid()] * 2 != [there] * 2


def test_operators_come_back_as_they_are():
    operators = [torch.ops.aten.add.Tensor, torch.ops.aten.stack.default]
    _, there = at_once(int, lambda: {"made": operators})
    assert all(one is other for one, other in zip(operators, there["made"], strict=True))


def test_the_second_sees_what_is_here_and_changes_nothing_of_it():
    seen = [1]

    def there():
        seen.append(2)
        return list(seen)

    _, found = at_once(int, there)
    assert found == [1, 2]
    if processes._forks():
        assert seen == [1]


def test_an_error_of_either_is_raised():
    def fails():
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        at_once(fails, int)
    with pytest.raises(ValueError, match="no such model"):
        at_once(int, fails)


@forks
@pytest.mark.parametrize("end", ("killed", "silent"))
def test_a_process_without_an_answer_is_done_without(end, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    ours = os.getpid()

    def there():
        if os.getpid() != ours:
            os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else time.sleep(60)
        return os.getpid()

    assert at_once(os.getpid, there) == (ours, ours)


@forks
def test_nothing_that_the_second_prints_is_seen(capfd):
    at_once(int, lambda: print("from there"))
    assert capfd.readouterr().out == ""


@forks
def test_tensors_are_computed_in_both():
    matrix = torch.ones(300, 300)
    here, there = at_once(lambda: float((matrix @ matrix).sum()), lambda: (matrix @ matrix).sum())
    assert here == float(there) == 300**3


def test_in_another_thread_both_run_here():
    found = []
    thread = threading.Thread(target=lambda: found.extend(at_once(os.getpid, os.getpid)))
    thread.start()
    thread.join()
    assert found == [os.getpid()] * 2
