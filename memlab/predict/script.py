"""A training script from the disk, unchanged, on a card that need not be there."""

import _thread
import contextlib
import json
import linecache
import os
import runpy
import signal
import sys
import threading
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlab.card.device import SimulatedGPU
from memlab.card.placement import NotSimulated
from memlab.footprint import Footprint
from memlab.trace.user_frames import line_of_error
from memlab.units import mib

LINES = 8  # of the script, in print
OUT_OF_MEMORY, NOT_HERE, FAILED, TIME_UP, INTERRUPTED = 3, 2, 1, 124, 130


@dataclass(frozen=True)
class ScriptRun:
    """What became of a script.

    footprint: its memory from the beginning to the end, whatever it reset on the way. steps: how
    many optimizer steps it made. error: why it ended before its end, in one line, else empty;
    line: where that was, `train.py:57`. status: the exit status that goes with it, the script's
    own where it gave one. raised: the exception that ended it, or None.
    """

    script: Path
    footprint: Footprint
    steps: int
    error: str = ""
    line: str = ""
    status: int = 0
    raised: BaseException | None = None

    def as_dict(self) -> dict:
        """Plain JSON values."""
        more = {"steps": self.steps, "error": self.error, "line": self.line}
        more["status"] = self.status
        return self.footprint.as_dict() | more | {"lines": self.footprint.by_line()}

    def __str__(self) -> str:
        ran = f"{self.steps} optimizer steps"
        if self.status == OUT_OF_MEMORY:
            ran = f"out of memory after {ran}, in {self.line}"
        elif self.error:
            ran = f"ended after {ran}" + (f", in {self.line}" if self.line else "")
        made = list(self.footprint.by_line().items())
        others = sum(n for _, n in made[LINES:])
        shown = [(mib(n), name, self._code(name)) for name, n in made[:LINES]]
        shown += [(mib(others), "other lines", "")] if others else []
        width = max((len(name) for _, name, _ in shown), default=0)
        rows = [f"{n:>12}  {name:<{width}}  {code}".rstrip() for n, name, code in shown]
        return "\n".join(
            [ran, str(self.footprint), "", "at the peak, by the line that made it", *rows]
        )

    def _code(self, name) -> str:
        """What stands in a line `train.py:57`."""
        file, _, number = name.rpartition(":")
        return (
            linecache.getline(str(self.script.parent / file), int(number)).strip() if file else ""
        )


class _EnoughSteps(BaseException):
    """Ends a script; no `except Exception` of its own stops that."""


class _Steps:
    """Counts the steps of each optimizer, and of a script that changes its weights by hand."""

    def __init__(self, wanted: int):
        self.wanted, self.made = wanted, Counter()

    def stepped(self, optimizer=None, args=(), kwargs=None) -> None:
        self.made[id(optimizer)] += 1
        if min(self.made.values()) >= self.wanted or max(self.made.values()) >= 3 * self.wanted:
            raise _EnoughSteps

    @property
    def most(self) -> int:
        return max(self.made.values(), default=0)


def run_script(path, arguments=(), gpu=None, steps: int = 2, snapshot=None, **settings):
    """As `try_script`, for a script that is to succeed or to run out of memory.

    Raises what ended it otherwise: ValueError, with the script's line, for what is not simulated,
    and what the script itself raises.
    """
    ran = try_script(path, arguments, gpu, steps, snapshot, **settings)
    if ran.raised is None or ran.status == OUT_OF_MEMORY or isinstance(ran.raised, SystemExit):
        return ran
    raise ran.raised


def try_script(
    path,
    arguments=(),
    gpu=None,
    steps: int = 2,
    snapshot=None,
    *,
    limit_minutes: float = float("inf"),
    ranks: int = 1,
    compile_eagerly: bool = False,
) -> ScriptRun:
    """Run a script as `python path arguments` would, inside a `SimulatedGPU`.

    It ends when every optimizer that has stepped has made so many steps, or one of them three times
    as many, or by itself, or at an exception, a Ctrl-C, or after limit_minutes; what was seen until
    then is told. A backward pass and a change of weights in place is a step, too. gpu, ranks,
    compile_eagerly: as for `SimulatedGPU`. snapshot: a file for PyTorch's memory viewer, or None.
    The script's numbers are stand-ins, as `SimulatedGPU` has them.

    Raises ValueError where there is no such file.
    """
    script = Path(path).resolve()
    if not script.is_file():
        raise ValueError(f"{path} is no file: allowed is a Python script")
    if _is_json(script):
        raise ValueError(f"{path} is a JSON file: allowed is a Python script")
    if steps < 1:
        raise ValueError(f"steps is {steps}: allowed are whole numbers from 1")
    counted, raised = _Steps(steps), None
    card = SimulatedGPU(gpu, script=script, ranks=ranks, compile_eagerly=compile_eagerly)
    card.tracer.on_step_by_hand = counted.stepped
    with _time_limit(limit_minutes) as clock, card, _as_main(script, arguments):
        hook = register_optimizer_step_post_hook(counted.stepped)
        try:
            runpy.run_path(str(script), run_name="__main__")
            card.tracer.end_step_by_hand()
        except _EnoughSteps:
            pass
        except BaseException as problem:
            raised = problem
        finally:
            clock.cancel()  # first: it rings again
            hook.remove()
    card.tracer.start = 0
    where = "" if raised is None else line_of_error(script, raised)
    error, status, raised = _ending(raised, where, counted.most, clock)
    if snapshot:
        try:
            card.dump_snapshot(snapshot)
        except OSError as problem:  # the answer may have taken hours, and is kept
            if Path(snapshot).is_file():
                Path(snapshot).unlink()
            lost = f"{snapshot} was not written: {problem.strerror}"
            error, status = "; ".join(filter(None, [error, lost])), status or FAILED
    return ScriptRun(script, card.footprint, counted.most, error, where, status, raised)


def _ending(raised, where, steps, clock) -> tuple[str, int, BaseException | None]:
    """(why a script ended, the exit status, the exception) of what it raised."""
    if isinstance(raised, torch.OutOfMemoryError):
        return str(raised), OUT_OF_MEMORY, raised
    if isinstance(raised, NotSimulated):
        return str(raised), NOT_HERE, ValueError(f"{where}: {raised}" if where else str(raised))
    if isinstance(raised, KeyboardInterrupt) and clock.up:
        return f"stopped after {clock.minutes:g} minutes", TIME_UP, raised
    if isinstance(raised, KeyboardInterrupt):
        return "interrupted", INTERRUPTED, raised
    if isinstance(raised, SystemExit) and raised.code:
        if isinstance(raised.code, int):
            return f"the script ended with status {raised.code}", raised.code, raised
        return str(raised.code), FAILED, raised
    if raised is not None and not isinstance(raised, SystemExit):
        return f"{type(raised).__name__}: {raised}", FAILED, raised
    return ("", 0, None) if steps else ("the script ended without an optimizer step", FAILED, None)


def traceback_of(ran: ScriptRun) -> str:
    """The traceback of the exception that ended a script, from its own first line on."""
    frames = ran.raised.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != str(ran.script):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(ran.raised), ran.raised, frames))


class _Clock:
    """Interrupts the main thread, as Ctrl-C does, when its time is up, until it has ended.

    Once is not enough: Python ignores an interrupt that comes while an object dies.
    """

    def __init__(self, minutes: float):
        self.minutes, self.up = minutes, False
        self._over = threading.Event()
        self._waiting = threading.Thread(target=self._ring, daemon=True)

    def start(self) -> None:
        if self.minutes != float("inf"):
            self._waiting.start()

    def cancel(self) -> None:
        self._over.set()

    def _ring(self) -> None:
        seconds = min(60 * self.minutes, threading.TIMEOUT_MAX)
        while not self._over.wait(seconds):
            self.up, seconds = True, AGAIN
            _thread.interrupt_main()


AGAIN = 1.0  # seconds between interrupts


@contextlib.contextmanager
def _time_limit(minutes):
    clock, handler = _Clock(minutes), signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()  # others may set no handlers
    ignored = minutes != float("inf") and not callable(handler) and here
    if ignored:  # as by what a shell starts in its background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    clock.start()
    try:
        yield clock
    finally:
        clock.cancel()
        if ignored:
            signal.signal(signal.SIGINT, handler)


def _is_json(file: Path) -> bool:
    """Whether a file is JSON, such as a config or a notebook, most of which Python takes, too."""
    try:
        json.loads(file.read_bytes())
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _as_main(script, arguments):
    """The names that a script finds when Python runs it."""
    with (
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        mock.patch.dict(os.environ),  # what the script sets there ends with it
    ):
        yield
