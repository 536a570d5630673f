"""Loops that wait for a value that is not known, and that its stand-in would never let end."""

import dis
import functools
import inspect
import sys
import weakref
from pathlib import Path
from types import ModuleType

import torch

from memlab.card.placement import NotSimulated
from memlab.card.steps import Steps

PATIENCE = 20  # readings in which nothing that is known changes, before another answer is given
MOST = 10_000  # readings in one loop, where something does
OTHERS = (0, 2**20)  # for a number that reads as 1: below and above what a loop compares it with
TRIES = 10  # other answers, after which the loop is given up
MARK = "_memlab_waits"
# Truncated normal numbers are drawn anew until all are within: one more draw is all that matters.
DRAWN = torch.nn.init.__file__


class Waits:
    """What the `while` loops at work have read that is not known.

    A loop that reads the same again and again, while nothing known changes (the numbers, texts and
    shapes that the loop's names stand for, the count of optimizer steps), waits for another value
    and is given one. Loops over an iterator end by themselves. `all(...)` of many tensors reads
    them all in one turn of the loop, which counts as one reading.

    assumptions: a dict that takes a line for each loop that was given another answer. steps: those
    of optimizers.
    """

    def __init__(self, assumptions: dict, steps: Steps):
        self._assumptions, self._steps = assumptions, steps
        self._of_modules: dict[int, dict] = {}  # by their names' dict
        self._last_read = lambda: None  # the storage of the last reading, while it is there
        # (id, instruction) of the frame that read it, while it is there
        self._reader: tuple[int, int] | None = None

    def notice(self, frame) -> None:
        """An operation runs in this frame: has the code that read last gone on since?"""
        if self._reader is not None:
            while frame is not None and id(frame) != self._reader[0]:
                frame = frame.f_back
            if frame is None or frame.f_lasti != self._reader[1]:
                self._reader = None

    def _is_same_turn(self, frame, tensor) -> bool:
        """Whether one instruction reads tensor after tensor: builtins do, of a generator's."""
        reader, storage = (id(frame), frame.f_lasti), tensor.untyped_storage()
        same = self._reader == reader and self._last_read() is not storage
        self._reader, self._last_read = reader, weakref.ref(storage)
        return same

    def answer(self, value, tensor):
        """A stand-in value of a tensor, or another one where a loop has waited for it for long.

        Raises NotSimulated, with the loop's line, where no other value ends it.
        """
        reader, place, frame = _loop_at_work(sys._getframe(1))
        if frame is None:
            return value
        state, marks = self._look(frame)
        reading = marks.setdefault(place, _Reading())
        if self._is_same_turn(reader, tensor) and type(reading.given) is type(value):
            return reading.given
        draws = frame.f_code.co_filename == DRAWN
        patience = 1 if draws else PATIENCE
        given = reading.given = reading.answer(value, (self._steps.made, *state), patience)
        line = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        if given is None:
            raise NotSimulated(
                f"the while loop at {line} waits for a value that only a real card has: it was "
                f"read {reading.times:,} times. Give the loop a bound, or do it on the host"
            )
        if given != value and not draws:
            assumption = f"{value!r} was read {PATIENCE} times, then {given!r}"
            self._assumptions[
                f"{line}: a loop waits for a value that is not known: {assumption}"
            ] = None
        return given

    def _look(self, frame):
        """(what is known of what the names in a frame stand for, what is kept of its readings)."""
        names = frame.f_locals
        if names is frame.f_globals:
            return _known_of(names), self._of_modules.setdefault(id(names), {})
        marks = names.get(MARK, {})
        state = _known_of({name: value for name, value in names.items() if name != MARK})
        # Before Python 3.13 these are copies, and would keep tensors alive. The frame has them, and
        # `names`, and getrefcount; whoever else has them called locals().
        if type(names) is dict and sys.getrefcount(names) <= 3:
            names.clear()
        names[MARK] = marks  # lives as long as the call
        return state, marks


class _Reading:
    """How often one place in a loop has read a value, and what was known then."""

    times = unchanged = others = 0
    known = given = None

    def answer(self, value, state, patience):
        """The value, another one, or None where the loop is given up."""
        self.times += 1
        self.unchanged = self.unchanged + 1 if state == self.known else 0
        self.known = state
        if self.times > MOST or self.others > TRIES:
            return None
        if self.unchanged < patience:
            return value
        self.unchanged = 0
        self.others += 1
        if isinstance(value, bool):
            return not value
        return type(value)(OTHERS[(self.others - 1) % len(OTHERS)])


def _loop_at_work(frame):
    """(the frame that reads a value, the place, the frame of the `while` loop around it).

    place: the instructions at work, from the reading to the loop. All are None where there is no
    such loop.
    """
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    reader = frame
    place: list[int] = []
    while frame is not None:
        place += id(frame.f_code), frame.f_lasti
        kind = _loop_around(frame.f_code, frame.f_lasti)
        if kind:
            return (reader, tuple(place), frame) if kind == "while" else (None, None, None)
        frame = frame.f_back
    return None, None, None


_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent / "utils"))


@functools.cache
def _is_ours(file) -> bool:
    return file.startswith(_OURS)


@functools.cache
def _loop_around(code, at) -> str:
    """`for` or `while`: the innermost loop around an instruction; empty for none."""
    around = [(start, kind) for start, end, kind in _loops(code) if start <= at <= end]
    return max(around)[1] if around else ""


@functools.cache
def _loops(code) -> list[tuple[int, int, str]]:
    """(first instruction, last one, kind) of each loop: of each jump back."""
    instructions = list(dis.get_instructions(code))
    at = {instruction.offset: instruction.opname for instruction in instructions}
    jumps = [
        (instruction.argval, instruction.offset)
        for instruction in instructions
        if instruction.opcode in (*dis.hasjrel, *dis.hasjabs)
        and instruction.argval < instruction.offset
        and "NO_INTERRUPT" not in instruction.opname  # waits for another generator
    ]
    return [(to, end, "for" if at[to] == "FOR_ITER" else "while") for to, end in jumps]


PLAIN = (int, float, str, bytes, bool, type(None))
SIZED = (list, tuple, dict, set)


def _known_of(names) -> list:
    """What is known of what names stand for: plain values, shapes and lengths."""
    values: list = []
    for value in list(names.values()):
        values += _known(value)
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and not (
            isinstance(value, (torch.Tensor, type, ModuleType)) or inspect.isroutine(value)
        ):
            for attribute in list(attributes.values()):
                values += _known(attribute)
    return values


def _known(value) -> tuple:
    if isinstance(value, PLAIN):
        return (value,)
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape),)
    return (len(value),) if isinstance(value, SIZED) else ()


def _short(file) -> str:
    """A file as it is read: below the packages, or with its folder."""
    _, _, installed = file.rpartition("site-packages/")
    return installed if "site-packages/" in file else Path(file).name
