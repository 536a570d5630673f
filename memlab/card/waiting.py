"""`while` loops that wait for an unknown value, and that its stand-in would never let end.

When code reads a stand-in value, this module walks up the Python stack and finds the innermost loop
around the reading, in the bytecode. If it is a `while` loop that has read the same value many times
while nothing else changed, the reading gets another value. A loop that no value ends is refused.

Known limitation: a change is seen only in plain values, tensor shapes and container lengths. They
are those of the variables of the loop's frame, and of the attributes of these variables.
"""

import dis
import functools
import inspect
import itertools
import sys
import weakref
from pathlib import Path
from types import CodeType, ModuleType

import torch

from memlab.card.placement import NotSimulated
from memlab.card.steps import Steps

PATIENCE = 20  # readings without any change in the known state, before another answer is given
MOST = 10_000  # readings of one loop, even if the known state does change
OTHERS = (0, 2**20)  # in place of 1: below and above what a loop may compare the number with
TRIES = 10  # other answers, after which the loop is given up
# Names, or their beginnings, of the instructions after which the next one does not run.
NO_NEXT = ("JUMP_FORWARD", "JUMP_BACKWARD", "RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE")
MARK = "_memlab_waits"  # the name, among a frame's locals, under which its readings are kept
# `trunc_normal_` draws again until all numbers lie within the bounds. One more draw takes all the
# memory that further draws would, so the second reading ends the loop, without an assumption.
DRAWN = torch.nn.init.__file__


class Waits:
    """The unknown values that the running `while` loops have read.

    A loop waits for another value if it reads the same one again and again while nothing known
    changes: the numbers, texts and shapes that the loop's names refer to, and the count of
    optimizer steps. It is then given another value. `for` loops end by themselves. `all(...)` over
    many tensors reads all of them in one iteration of the loop, which counts as one reading.

    assumptions: a dict that gets a line for each loop that was given another answer.
    steps: the optimizer steps of the run.
    """

    def __init__(self, assumptions: dict, steps: Steps):
        self._assumptions, self._steps = assumptions, steps
        # The readings of loops at the top level of a module, by the ids of its globals and code.
        # The code is kept with them, so that no other code gets its id.
        self._of_modules: dict[tuple[int, int], tuple[CodeType, dict]] = {}
        self._last_read = lambda: None  # weak reference to the storage of the last reading
        # (id of the frame, offset of the instruction) of that reading; None once it has gone on
        self._reader: tuple[int, int] | None = None

    def notice(self, frame) -> None:
        """Note that an operation runs in `frame`: has the code that read last gone on since?"""
        if self._reader is not None:
            while frame is not None and id(frame) != self._reader[0]:
                frame = frame.f_back
            # It has, unless its frame is still on the stack and at the same instruction.
            if frame is None or _instruction(frame.f_code, frame.f_lasti) != self._reader[1]:
                self._reader = None

    def _is_same_turn(self, frame, tensor) -> bool:
        """Whether the instruction that read last reads another tensor, in the same iteration.

        Builtins such as `all` and `max` do so with the tensors of a generator. `frame` is then the
        frame that called the builtin.
        """
        reader = id(frame), _instruction(frame.f_code, frame.f_lasti)
        storage = tensor.untyped_storage()
        same = self._reader == reader and self._last_read() is not storage
        self._reader, self._last_read = reader, weakref.ref(storage)
        return same

    def answer(self, value, tensor):
        """The stand-in value of a tensor, or another value if a loop has waited too long.

        Raises NotSimulated, with the line of the loop, if no other value ends it.
        """
        reader, place, frame = _loop_at_work(sys._getframe(1))
        if frame is None:  # no `while` loop
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
                f"read {reading.times:,} times. Give the loop a bound, or run it on the host"
            )
        if given != value and not draws:
            assumption = f"{value!r} was read {PATIENCE} times, then {given!r}"
            self._assumptions[
                f"{line}: a loop waits for a value that is not known: {assumption}"
            ] = None
        return given

    def _look(self, frame):
        """(the known state of the names in a frame, the readings of its loops by place)."""
        names = frame.f_locals
        if names is frame.f_globals:
            code = frame.f_code
            _, marks = self._of_modules.setdefault((id(names), id(code)), (code, {}))
            return _known_of(names), marks
        marks = names.get(MARK, {})
        state = _known_of({name: value for name, value in names.items() if name != MARK})
        # Before Python 3.13, `f_locals` of a function is a dict that the frame keeps: a snapshot of
        # its variables, which would keep tensors alive. So it is emptied, unless the user's code
        # holds it from a call of locals(): three references are the frame, `names` and getrefcount.
        if type(names) is dict and sys.getrefcount(names) <= 3:
            names.clear()
        names[MARK] = marks  # lives as long as the frame, so each call counts from zero
        return state, marks


class _Reading:
    """How often one place in a loop has read a value, and the known state at the last reading.

    times: readings so far.
    unchanged: readings in a row with the same known state.
    others: how many other answers were given.
    known: the known state at the last reading.
    given: the last answer.
    """

    times = unchanged = others = 0
    known = given = None

    def answer(self, value, state, patience):
        """The value itself, another value, or None if the loop is to be given up."""
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
        return type(value)(OTHERS[(self.others - 1) % len(OTHERS)])  # 0, 2**20, 0, ...


def _loop_at_work(frame):
    """(frame that reads a value, place, frame of the innermost loop around it, a `while` loop).

    place: the code and the instruction of every frame from the reading up to the loop. It tells the
    readings of one loop apart. All three are None without a loop, and for a `for` loop.
    """
    reader = None
    place: list[int] = []
    while frame is not None:
        # Skip the simulation's own frames, and PyTorch's dispatch modes.
        if not _is_ours(frame.f_code.co_filename):
            reader = reader or frame
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
    """The kind of the innermost loop around an instruction, `for` or `while`; empty for none."""
    around = [(first, kind) for first, kind, inside in _loops(code) if kind and at in inside]
    return max(around)[1] if around else ""  # the one that starts last


@functools.cache
def _instruction(code, at) -> int:
    """The instruction at work; one for a whole call of `all` or `any`."""
    calls = [first for first, kind, inside in _loops(code) if not kind and at in inside]
    return max(calls, default=at)


@functools.cache
def _loops(code) -> list[tuple[int, str, set[int]]]:
    """(first instruction, kind, all instructions) of each loop: of each backward jump.

    The kind is `for`, `while`, or empty for a call of `all` or `any` with a generator, which Python
    3.14 compiles as a loop.

    Instructions are named by their offsets. Those of a loop are found by going back from its jump,
    not by their order: compilers move handlers of exceptions, which may jump into a loop, to the
    end of the function.

    NB: Python 3.11 compiles the first test of a `while` loop as code before the loop.
    """
    instructions = list(dis.get_instructions(code))
    ends = [instruction.offset for instruction in instructions[1:]] + [len(code.co_code)]
    after_for = {
        one.offset: then.opname
        for one, then in itertools.pairwise(instructions)
        if one.opname == "FOR_ITER"
    }
    before: dict[int, list[int]] = {}  # instruction -> those that may run just before it
    jumps = []
    for instruction, end in zip(instructions, ends, strict=True):
        offset, name = instruction.offset, instruction.opname
        if not name.startswith(NO_NEXT):
            before.setdefault(end, []).append(offset)
        if instruction.opcode in (*dis.hasjrel, *dis.hasjabs):
            before.setdefault(instruction.argval, []).append(offset)
            # `yield from` and `await` jump back without a loop.
            if instruction.argval < offset and "NO_INTERRUPT" not in name:
                jumps.append((instruction.argval, offset))
    # A frame may be at one of the caches that follow an instruction.
    after = {one.offset: end for one, end in zip(instructions, ends, strict=True)}
    loops = []
    for first, last in jumps:
        inside, waiting = {first}, [last]
        while waiting:
            offset = waiting.pop()
            if offset not in inside:
                inside.add(offset)
                waiting += before.get(offset, ())
        # A `for` loop gives its item a name first; `all` and `any` ask whether it is true.
        kind = {None: "while", "TO_BOOL": ""}.get(after_for.get(first), "for")
        loops.append((first, kind, {at for one in inside for at in range(one, after[one])}))
    return loops


PLAIN = (int, float, str, bytes, bool, type(None))
SIZED = (list, tuple, dict, set)


def _known_of(names) -> list:
    """The plain values, shapes and lengths that names refer to, and those of their attributes."""
    values: list = []
    for value in list(names.values()):
        values += _known(value)
        # Attributes of the user's own objects, such as a counter of a trainer.
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
    """A file in print: its path below site-packages, or else its name."""
    _, _, installed = file.rpartition("site-packages/")
    return installed if "site-packages/" in file else Path(file).name
