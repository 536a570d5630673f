"""Independent work on two cores at once."""

from __future__ import annotations

import functools
import io
import multiprocessing
import operator
import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from tqdm.auto import tqdm

PATIENCE = 60.0  # seconds at least that are waited for a process once this one is done


def at_once(here: Callable, there: Callable) -> tuple:
    """What two functions return; the second runs in a process that is forked meanwhile.

    It must not change what the first one reads, and what it returns can be pickled. Nothing that it
    prints is seen. Where a process cannot be forked safely (not on Linux, one core, a thread that
    is not the main one, a real GPU, whose threads do not outlive a fork) or there are two already,
    and where the process ends without an answer, the second function runs here, too, and raises
    what it raises.
    """
    if not _forks():
        return here(), there()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, theirs), daemon=True)
    with warnings.catch_warnings():  # Python 3.12 warns of threads; the child needs no lock of them
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    try:
        start = time.monotonic()
        first = here()
        if ours.poll(max(PATIENCE, 2 * (time.monotonic() - start))):
            try:
                return first, pickle.loads(ours.recv_bytes())
            except EOFError:
                pass
    finally:
        process.kill()
        process.join()
        ours.close()
    return first, there()


def map_at_once(function: Callable, items: Sequence) -> list:
    """`map`, over the last item in a second process, as `at_once` has it."""
    *first, last = items
    here, there = at_once(lambda: [function(one) for one in first], lambda: function(last))
    return [*here, there]


def _forks() -> bool:
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and threading.current_thread() is threading.main_thread()
        and not multiprocessing.current_process().daemon
        and not multiprocessing.active_children()
        and not torch.cuda.is_available()
    )


def _answer(task, pipe):
    """What the process does: run the task and send what it returns, or end without an answer."""
    torch.set_num_threads(1)  # OpenMP's other threads are not there after a fork
    sys.stdout = sys.stderr = open(os.devnull, "w")
    tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)
    for bar in tqdm._instances:
        bar.disable = True
    sent = io.BytesIO()
    _Pickler(sent).dump(task())
    pipe.send_bytes(sent.getbuffer())


class _Pickler(pickle.Pickler):
    """Knows PyTorch's operators by their names."""

    def reducer_override(self, value):
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (str(value),)
        return NotImplemented


def _operator(name: str) -> torch._ops.OpOverload:
    """The operator, as `aten.add.Tensor`."""
    return operator.attrgetter(name)(torch.ops)
