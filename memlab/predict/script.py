"""Run an unchanged training script on a simulated GPU, and report its memory.

The script runs in this process, as `__main__`, until its optimizers have made enough steps. Then an
exception ends it. What the simulated GPU has seen by then gives the footprint, the script's lines
that hold memory at the peak, and the verdict.
"""

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

LINES = 8  # lines of the script that `ScriptRun` prints
# Exit statuses of `memlab run`. `NOT_HERE`: the script uses what is not simulated. 124 is that of
# timeout(1), and 130 that of a shell for a process ended by Ctrl-C (128 + SIGINT).
OUT_OF_MEMORY, NOT_HERE, FAILED, TIME_UP, INTERRUPTED = 3, 2, 1, 124, 130


@dataclass(frozen=True)
class ScriptRun:
    """The result of running a script.

    script: the path of the script.
    footprint: its memory from beginning to end, even if the script reset the peak in between.
    steps: the number of optimizer steps that it made.
    error: why it ended early, in one line; empty if it did not.
    line: where that happened, such as `train.py:57`.
    status: the matching exit status; the script's own if it gave one.
    raised: the exception that ended it, or None.
    verdict: whether what ran fits the GPU with the margin of `memlab.fits`. None for a GPU without
        a limit, and if an error, a Ctrl-C or the time limit ended the script.
    phases: what ran and what did not, one line each.
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
        """Whether the script ran out of GPU memory."""
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
        return "\n".join([*head, "", "at the peak, by the line that allocated it", *rows])

    def ending(self) -> str:
        """How far the script got, in one line."""
        steps = f"{self.steps} optimizer step{'s' * (self.steps != 1)}"
        if isinstance(self.raised, torch.OutOfMemoryError):
            phase = phase_of_error(self.raised)
            return f"out of memory{f' in {phase}' * bool(phase)} after {steps}, in {self.line}"
        if self.error:
            return f"ended after {steps}" + (f", in {self.line}" if self.line else "")
        return steps

    def _code(self, name: str) -> str:
        """The source code of a line named as `train.py:57`."""
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
    """As `try_script`, for a script that is expected to succeed or to run out of memory.

    Raises the exception that ended the script for any other reason. For code that is not simulated
    that is a ValueError, which names the script's line.
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

    gpu, compile_eagerly: as for `SimulatedGPU`.
    steps: optimizer steps of each optimizer, after which the script is ended.
    snapshot: a file to write for PyTorch's memory viewer, or None.
    limit_minutes: minutes after which the script is ended.
    ranks: run as the first of this many ranks under torchrun, which may be 1; None for a plain
        start.
    phases: whether transformers' Trainer trains on its longest texts, and then evaluates and saves
        once (`memlab.predict.trainer_phases`).
    module: whether `path` is the name of a module, as for `python -m`.

    The script ends when every optimizer has made `steps` steps, or one of them three times as many.
    It may also end by itself, by an exception, by Ctrl-C or after `limit_minutes`. The result
    describes what ran until then. A backward pass followed by an in-place change of weights counts
    as a step, too. Values of tensors are stand-ins, as in `SimulatedGPU`.

    Raises ValueError if there is no such file or module, and for `steps` below 1.
    """
    script = _file_of_module(str(path)) if module else Path(path).resolve()
    if not script.is_file():
        raise ValueError(f"{path} is not a file: allowed is a Python script")
    if steps < 1:
        raise ValueError(f"steps is {steps}: allowed are whole numbers from 1")
    card = SimulatedGPU(
        gpu, script=script, ranks=1 if ranks is None else ranks, compile_eagerly=compile_eagerly
    )
    seen = (OneOfEach if phases else Phases)(card, steps)
    raised, is_up = None, threading.Event()
    # Steps are counted in two places: those of optimizers by the hook below, and changes of weights
    # without an optimizer by the simulated GPU.
    card.steps.on_step_by_hand = seen.stepped
    start = _as_main(script, arguments, ranks, module)
    shown = shows_where_it_is(script, lambda: seen.most_steps)
    with shown, card, start, seen:
        # Registered after the GPU's own hook, which must have closed the step's work before.
        hook = register_optimizer_step_post_hook(seen.stepped)
        try:
            with _time_limit(limit_minutes) as is_up:
                if module:
                    runpy.run_module(str(path), run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(str(script), run_name="__main__")
                card.steps.end_by_hand()  # a last step by hand ends with the script
        except EnoughSteps:
            pass
        except BaseException as problem:  # SystemExit and KeyboardInterrupt, too
            raised = problem
        finally:
            hook.remove()
    card.tracer.start = 0  # the peak of the whole run, even if the script has reset it
    where = "" if raised is None else line_of_error(script, raised)
    limit = f"{limit_minutes:g} minutes" * is_up.is_set()
    error, status, raised = _ending(raised, where, seen.most_steps, limit)
    footprint = _without_part_of_a_step(card.footprint, seen.most_steps)
    if not (error or footprint.peak_allocated):
        error, status = "the script ended without putting a tensor on the card", FAILED
    verdict = None if error else _verdict(card, footprint)
    if verdict and not verdict.fits:
        status = OUT_OF_MEMORY
    # A script that failed has more urgent problems than the phases that it did not reach.
    lines = () if error and status != OUT_OF_MEMORY else tuple(seen.lines())
    if snapshot and (lost := _not_written(card, snapshot)):
        error, status = "; ".join(filter(None, [error, lost])), status or FAILED
    steps = seen.most_steps
    return ScriptRun(script, footprint, steps, error, where, status, raised, verdict, lines)


def _not_written(card: SimulatedGPU, snapshot: str | Path) -> str:
    """Write the snapshot. Returns why that failed, or an empty text.

    It raises nothing, because the simulation may have taken hours and its result must not be lost.
    """
    try:
        card.dump_snapshot(snapshot)
    except OSError as problem:
        if Path(snapshot).is_file():
            Path(snapshot).unlink()  # written in part
        return f"{snapshot} was not written: {problem.strerror}"
    return ""


def _without_part_of_a_step(footprint: Footprint, steps: int) -> Footprint:
    """The footprint without a step time, unless two steps have ended.

    The work of the first step includes loading the model. The returned footprint also has the
    assumption about a missing Triton.
    """
    assumptions = *footprint.assumptions, *without_triton()
    if steps > 1 or footprint.step_time is None:
        return replace(footprint, assumptions=assumptions)
    why = "only the second optimizer step is timed, because the first includes what precedes it"
    return replace(footprint, assumptions=assumptions, step_time=None, no_time=why)


def _verdict(card: SimulatedGPU, footprint: Footprint) -> Verdict | None:
    """Whether what ran on a GPU fits it with the margin; None for a GPU without a limit."""
    if card.gpu.total_memory is None:
        return None

    def peak_on(gpu: GPU) -> int | None:
        # `verdict_by` asks without a limit first. The run itself may have met the GPU's limit and
        # released cached blocks; its peak is then at most the GPU's memory.
        if gpu.total_memory is None:
            return footprint.peak_reserved
        grows = card.memory.expandable_segments
        allocator = CachingAllocator(gpu.usable, False, grows, gpu.total_memory)
        return peak_reserved(card.tracer.events(), allocator)

    return verdict_by(peak_on, card.gpu)


def _ending(
    raised: BaseException | None, where: str, steps: int, limit: str
) -> tuple[str, int, BaseException | None]:
    """(why a script ended, the exit status, the exception to report), from what it raised.

    where: the script's line that raised it. limit: the time limit that stopped the script, as text;
    empty if none did.
    """
    until_then = "" if steps else " before the first optimizer step: no answer for a step"
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
    """The traceback of the exception that ended a script, starting in the script itself."""
    if ran.raised is None:
        return ""
    frames = ran.raised.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != str(ran.script):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(ran.raised), ran.raised, frames))


AGAIN = 1.0  # seconds between interrupts once the time is up


@contextlib.contextmanager
def _time_limit(minutes: float) -> Iterator[threading.Event]:
    """Raise KeyboardInterrupt in this thread when the time is up, and again until the block ends.

    Once is not enough, because Python ignores an interrupt that arrives while an object is being
    destroyed. Yields an event that is set once the time is up.
    """
    is_up, has_ended = threading.Event(), threading.Event()
    thread = ctypes.c_ulong(threading.get_ident())

    def ring() -> None:
        seconds = min(60 * minutes, threading.TIMEOUT_MAX)
        while not has_ended.wait(seconds):
            is_up.set()
            seconds = AGAIN
            # An exception in the thread rather than a signal. Signals reach the main thread only,
            # and a process that a shell started in the background ignores SIGINT.
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
    """`sys.argv`, `sys.path` and the environment as `python` or torchrun would set them."""
    # `python -m` puts the working directory first, `python file` the folder of the file.
    folder = os.getcwd() if module else str(script.parent)
    with (
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [folder, *sys.path]),
        # Restores the whole environment, so that what the script sets there ends with it.
        mock.patch.dict(os.environ, torchrun_environment(ranks) if ranks else {}),
    ):
        yield


def _file_of_module(name: str) -> Path:
    """The file that `python -m name` runs.

    Raises ValueError if Python finds no such module.
    """
    # Not `importlib.util.find_spec`, which imports the packages above the module. Those must be
    # imported on the simulated GPU.
    for folder in [os.getcwd(), *sys.path]:
        place = Path(folder, *name.split("."))
        for file in place / "__main__.py", Path(f"{place}.py"):
            if file.is_file():
                return file.resolve()
    raise ValueError(f"{name} is not a module that Python finds: allowed is one to run")
