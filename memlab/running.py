"""A training script from the disk, unchanged, on a card that need not be there."""

import contextlib
import json
import linecache
import runpy
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlab.card.gpu import SimulatedGPU
from memlab.card.places import NotSimulated
from memlab.footprint import Footprint
from memlab.trace.script_lines import line_of_error
from memlab.units import mib

LINES = 8  # of the script, in print


@dataclass(frozen=True)
class ScriptRun:
    """What became of a script.

    footprint: its memory from the beginning to the end, whatever it reset on the way. steps: how
    many optimizer steps it made. error: PyTorch's message where it ran out of memory, else empty;
    line: where that was, `train.py:57`.
    """

    script: Path
    footprint: Footprint
    steps: int
    error: str = ""
    line: str = ""

    def as_dict(self) -> dict:
        """Plain JSON values."""
        more = {"steps": self.steps, "error": self.error, "line": self.line}
        return self.footprint.as_dict() | more | {"lines": self.footprint.by_line()}

    def __str__(self) -> str:
        ran = f"{self.steps} optimizer steps"
        if self.error:
            ran = f"out of memory after {ran}, in {self.line}"
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


def run_script(path, arguments=(), gpu=None, steps: int = 2, snapshot=None) -> ScriptRun:
    """Run a script as `python path arguments` would, inside a `SimulatedGPU`.

    It ends when every optimizer that has stepped has made so many steps, or one of them three times
    as many, or by itself. gpu: as for `SimulatedGPU`. snapshot: a file for PyTorch's memory
    viewer, or None. The script's numbers are stand-ins, as `SimulatedGPU` has them.

    Raises ValueError, with the script's line, for what is not simulated and where there is no such
    file, and what the script itself raises.
    """
    script = Path(path).resolve()
    if not script.is_file():
        raise ValueError(f"{path} is no file: allowed is a Python script")
    if _is_json(script):
        raise ValueError(f"{path} is a JSON file: allowed is a Python script")
    if steps < 1:
        raise ValueError(f"steps is {steps}: allowed are whole numbers from 1")
    made, error = Counter(), None

    def stepped(optimizer, args, kwargs):
        made[id(optimizer)] += 1
        if min(made.values()) >= steps or max(made.values()) >= 3 * steps:
            raise _EnoughSteps

    card = SimulatedGPU(gpu, script=script)
    with card, _as_main(script, arguments):
        hook = register_optimizer_step_post_hook(stepped)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except (_EnoughSteps, SystemExit):
            pass
        except torch.OutOfMemoryError as problem:
            error = problem
        except NotSimulated as problem:
            raise ValueError(f"{line_of_error(script, problem)}: {problem}") from None
        finally:
            hook.remove()
    card.tracer.start = 0
    if snapshot:
        card.dump_snapshot(snapshot)
    number = max(made.values(), default=0)
    if error is None:
        return ScriptRun(script, card.footprint, number)
    return ScriptRun(script, card.footprint, number, str(error), line_of_error(script, error))


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
    ):
        yield
