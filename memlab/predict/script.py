"""A training script from the disk, unchanged, on a card that need not be there."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlab.card.device import SimulatedGPU
from memlab.card.kernels.triton import without_triton
from memlab.card.placement import NotSimulated
from memlab.card.process_group import torchrun_environment
from memlab.footprint import Footprint
from memlab.gpus import GPU
from memlab.predict.fit import Verdict, verdict_by
from memlab.predict.script_progress import shows_where_it_is
from memlab.predict.trainer_phases import EnoughSteps, OneOfEach, Phases, phase_of_error
from memlab.trace.allocator import CachingAllocator
from memlab.trace.log import peak_reserved
from memlab.trace.user_frames import line_of_error
from memlab.units import in_unit_of

LINES = 8  # of the script, in print
OUT_OF_MEMORY, NOT_HERE, FAILED, TIME_UP, INTERRUPTED = 3, 2, 1, 124, 130


@dataclass(frozen=True)
class ScriptRun:
    """What became of a script.

    footprint: its memory from the beginning to the end, whatever it reset on the way. steps: how
    many optimizer steps it made. error: why it ended before its end, in one line, else empty;
    line: where that was, `train.py:57`. status: the exit status that goes with it, the script's
    own where it gave one. raised: the exception that ended it, or None. verdict: whether what ran
    fits the card with the margin of `memlab.fits`, None for a card without a limit and where an
    error, a Ctrl-C or the time limit ended it. phases: what ran and what did not, a line each.
    """

    script: Path
    footprint: Footprint
    steps: int
    error: str = ""
    line: str = ""
    status: int = 0
    raised: BaseException | None = None
    verdict: Verdict | None = None
    phases: tuple[str, ...] = ()

    @property
    def ran_out(self) -> bool:
        """Whether it ran out of the card's memory."""
        return isinstance(self.raised, torch.OutOfMemoryError)

    def as_dict(self) -> dict:
        """Plain JSON values."""
        more = {"steps": self.steps, "error": self.error, "line": self.line}
        more |= {"status": self.status, "phases": list(self.phases)}
        return self.footprint.as_dict() | more | {"lines": self.footprint.by_line()}

    def __str__(self) -> str:
        lines = list(self.footprint.by_line().items())
        others = sum(n for _, n in lines[LINES:])
        lines = [*lines[:LINES], *([("other lines", others)] if others else [])]
        largest = self.footprint.peak_allocated
        width = max((len(name) for name, _ in lines), default=0)
        rows = [
            f"{in_unit_of(n, largest):>12}  {name:<{width}}  {self._code(name)}".rstrip()
            for name, n in lines
        ]
        head = [self.ending(), *self.phases, str(self.footprint)]
        return "\n".join([*head, "", "at the peak, by the line that made it", *rows])

    def ending(self) -> str:
        """How far it came, in a line."""
        steps = f"{self.steps} optimizer step{'s' * (self.steps != 1)}"
        if isinstance(self.raised, torch.OutOfMemoryError):
            phase = phase_of_error(self.raised)
            return f"out of memory{f' in {phase}' * bool(phase)} after {steps}, in {self.line}"
        if self.error:
            return f"ended after {steps}" + (f", in {self.line}" if self.line else "")
        return steps

    def _code(self, name: str) -> str:
        """What stands in a line `train.py:57`."""
        file, _, number = name.rpartition(":")
        return (
            linecache.getline(str(self.script.parent / file), int(number)).strip() if file else ""
        )


def run_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    gpu: GPU | str | int | None = None,
    steps: int = 2,
    snapshot: str | Path | None = None,
    **settings: Any,
) -> ScriptRun:
    """As `try_script`, for a script that is to succeed or to run out of memory.

    Raises what ended it otherwise: ValueError, with the script's line, for what is not simulated,
    and what the script itself raises.
    """
    ran = try_script(path, arguments, gpu, steps, snapshot, **settings)
    if ran.raised is None or ran.ran_out or isinstance(ran.raised, SystemExit):
        return ran
    raise ran.raised


def try_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    gpu: GPU | str | int | None = None,
    steps: int = 2,
    snapshot: str | Path | None = None,
    *,
    limit_minutes: float = float("inf"),
    ranks: int | None = None,
    compile_eagerly: bool = False,
    phases: bool = False,
    module: bool = False,
) -> ScriptRun:
    """Run a script as `python path arguments` would, inside a `SimulatedGPU`.

    ranks: started by torchrun, as the first of so many, of one, too; None for a plain start.
    module: whether `path` is a module's name, as of `python -m`.

    It ends when every optimizer has made so many steps, or one of them three times as many, or by
    itself, or at an exception, a Ctrl-C, or after limit_minutes; what was seen until then is told.
    A backward pass and a change of weights in place is a step, too. gpu, compile_eagerly: as for
    `SimulatedGPU`. snapshot: a file for PyTorch's memory viewer, or None.
    phases: whether transformers' Trainer takes its longest texts, and then evaluates and saves
    once (`memlab.predict.trainer_phases`).
    The script's numbers are stand-ins, as `SimulatedGPU` has them.

    Raises ValueError where there is no such file.
    """
    script = _file_of_module(str(path)) if module else Path(path).resolve()
    if not script.is_file():
        raise ValueError(f"{path} is no file: allowed is a Python script")
    if steps < 1:
        raise ValueError(f"steps is {steps}: allowed are whole numbers from 1")
    card = SimulatedGPU(
        gpu, script=script, ranks=1 if ranks is None else ranks, compile_eagerly=compile_eagerly
    )
    seen = (OneOfEach if phases else Phases)(card, steps)
    raised, is_up = None, threading.Event()
    card.steps.on_step_by_hand = seen.stepped
    start = _as_main(script, arguments, ranks, module)
    shown = shows_where_it_is(script, lambda: seen.most_steps)
    with shown, card, start, seen:
        hook = register_optimizer_step_post_hook(seen.stepped)
        try:
            with _time_limit(limit_minutes) as is_up:
                if module:
                    runpy.run_module(str(path), run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(str(script), run_name="__main__")
                card.steps.end_by_hand()
        except EnoughSteps:
            pass
        except BaseException as problem:
            raised = problem
        finally:
            hook.remove()
    card.tracer.start = 0
    where = "" if raised is None else line_of_error(script, raised)
    limit = f"{limit_minutes:g} minutes" * is_up.is_set()
    error, status, raised = _ending(raised, where, seen.most_steps, limit)
    footprint = _without_part_of_a_step(card.footprint, seen.most_steps)
    if not (error or footprint.peak_allocated):
        error, status = "the script ended without a tensor on the card", FAILED
    verdict = None if error else _verdict(card, footprint)
    if verdict and not verdict.fits:
        status = OUT_OF_MEMORY
    lines = () if error and status != OUT_OF_MEMORY else tuple(seen.lines())
    if snapshot and (lost := _not_written(card, snapshot)):
        error, status = "; ".join(filter(None, [error, lost])), status or FAILED
    steps = seen.most_steps
    return ScriptRun(script, footprint, steps, error, where, status, raised, verdict, lines)


def _not_written(card: SimulatedGPU, snapshot: str | Path) -> str:
    """Why a snapshot is not there; the answer beside it may have taken hours, and is kept."""
    try:
        card.dump_snapshot(snapshot)
    except OSError as problem:
        if Path(snapshot).is_file():
            Path(snapshot).unlink()
        return f"{snapshot} was not written: {problem.strerror}"
    return ""


def _without_part_of_a_step(footprint: Footprint, steps: int) -> Footprint:
    """Without seconds before two steps have ended: the first has the loading of the model in it."""
    assumptions = *footprint.assumptions, *without_triton()
    if steps > 1 or footprint.step_time is None:
        return replace(footprint, assumptions=assumptions)
    why = "of two optimizer steps the second is timed, the first has what comes before it"
    return replace(footprint, assumptions=assumptions, step_time=None, no_time=why)


def _verdict(card: SimulatedGPU, footprint: Footprint) -> Verdict | None:
    """Whether what a card has seen fits it with the margin; None for a card without a limit."""
    if card.gpu.total_memory is None:
        return None

    def peak_on(gpu: GPU) -> int | None:
        if gpu.total_memory is None:
            return footprint.peak_reserved
        grows = card.memory.expandable_segments
        allocator = CachingAllocator(gpu.usable, False, grows, gpu.total_memory)
        return peak_reserved(card.tracer.events(), allocator)

    return verdict_by(peak_on, card.gpu)


def _ending(
    raised: BaseException | None, where: str, steps: int, limit: str
) -> tuple[str, int, BaseException | None]:
    """(why a script ended, the exit status, the exception) of what it raised.

    limit: the time after which it was stopped, in words, else empty.
    """
    until_then = "" if steps else " before a first optimizer step: no answer for one"
    if isinstance(raised, torch.OutOfMemoryError):
        return str(raised), OUT_OF_MEMORY, raised
    if isinstance(raised, NotSimulated):
        return str(raised), NOT_HERE, ValueError(f"{where}: {raised}" if where else str(raised))
    if isinstance(raised, KeyboardInterrupt) and limit:
        return f"stopped after {limit}{until_then}", TIME_UP, raised
    if isinstance(raised, KeyboardInterrupt):
        return f"interrupted{until_then}", INTERRUPTED, raised
    if isinstance(raised, SystemExit) and raised.code:
        if isinstance(raised.code, int):
            return f"the script ended with status {raised.code}", raised.code, raised
        return str(raised.code), FAILED, raised
    if raised is not None and not isinstance(raised, SystemExit):
        return f"{type(raised).__name__}: {raised}", FAILED, raised
    return "", 0, None


def traceback_of(ran: ScriptRun) -> str:
    """The traceback of the exception that ended a script, from its own first line on."""
    if ran.raised is None:
        return ""
    frames = ran.raised.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != str(ran.script):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(ran.raised), ran.raised, frames))


AGAIN = 1.0  # seconds between interrupts


@contextlib.contextmanager
def _time_limit(minutes: float) -> Iterator[threading.Event]:
    """Interrupt this thread, as Ctrl-C does, when its time is up, and again until it has ended.

    Once is not enough: Python ignores an interrupt that comes while an object dies. Gives what is
    set when the time is up.
    """
    is_up, has_ended = threading.Event(), threading.Event()
    thread = ctypes.c_ulong(threading.get_ident())

    def ring() -> None:
        seconds = min(60 * minutes, threading.TIMEOUT_MAX)
        while not has_ended.wait(seconds):
            is_up.set()
            seconds = AGAIN
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))

    if minutes != float("inf"):
        threading.Thread(target=ring, daemon=True).start()
    try:
        yield is_up
    finally:
        has_ended.set()


@contextlib.contextmanager
def _as_main(
    script: Path, arguments: Sequence[str], ranks: int | None, module: bool
) -> Iterator[None]:
    """The names that a script finds when Python runs it, or torchrun for so many ranks."""
    folder = os.getcwd() if module else str(script.parent)
    with (
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [folder, *sys.path]),
        # What the script sets there ends with it.
        mock.patch.dict(os.environ, torchrun_environment(ranks) if ranks else {}),
    ):
        yield


def _file_of_module(name: str) -> Path:
    """Where the code of `python -m name` is; packages above it are not imported yet.

    Raises ValueError where Python finds no such module.
    """
    for folder in [os.getcwd(), *sys.path]:
        place = Path(folder, *name.split("."))
        for file in place / "__main__.py", Path(f"{place}.py"):
            if file.is_file():
                return file.resolve()
    raise ValueError(f"{name} is no module that Python finds: allowed is one to run")
