"""What a script has done by the end of its run, and what it would still have done.

A run ends after a few optimizer steps. Evaluation, saving and batches of longer texts would come
later and may need more memory. For transformers' Trainer and its subclasses, the arguments and the
data set tell which of these are left. `OneOfEach` makes the Trainer run each of them once.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import tempfile
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from memlab.footprint import Phase
from memlab.trace.patches import replaced
from memlab.units import in_unit_of

if TYPE_CHECKING:
    from memlab.card.device import SimulatedGPU

MOST_READ = 10_000  # lengths that are read of a data set, from its beginning
# Batches of an evaluation. They are enough unless the evaluation keeps all predictions on the GPU.
EVALUATED = 2
TRAINING, EVALUATION, SAVING = "training", "evaluation", "saving"
# Function of a trainer or a model -> the phase to report if it is in the traceback of an error.
PHASES = {
    "evaluate": EVALUATION,
    "evaluation_loop": EVALUATION,
    "predict": EVALUATION,
    "generate": "generation",
    "save_model": SAVING,
    "_save_checkpoint": SAVING,
    "save_pretrained": SAVING,
}


def phase_of_error(error: BaseException) -> str:
    """The innermost phase of `PHASES` in the traceback of an error; empty if there is none."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return next((PHASES[name] for name in reversed(names) if name in PHASES), "")


class EnoughSteps(BaseException):
    """Ends a script. Not an `Exception`, so that the script's own handlers do not catch it."""


class Phases:
    """Count a script's optimizer steps, end the script after enough of them, report what is left.

    steps: the steps of each optimizer made inside this context after which the script ends. It also
        ends when one optimizer has made three times as many.
    """

    differ = True  # whether to report that the steps differ in size

    def __init__(self, card: SimulatedGPU, steps: int):
        self.card, self.steps, self.cut = card, steps, False
        self._fewest = 0  # `fewest_steps` when the script was ended
        self.trainer: Any = None
        # By the id of the optimizer: its steps, and the different numbers of floating-point
        # operations that their backward passes had.
        self._steps_made: Counter[int] = Counter()
        self._operations: dict[int, set[int]] = defaultdict(set)
        # Optimizers that have not made a step yet, such as a generator's while its critic makes
        # five. Weak, because a script may make an optimizer and drop it.
        self._without_step: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Phases:
        # Every optimizer must be known before its first step, so note it when it is made.
        initialize = torch.optim.Optimizer.__init__

        @functools.wraps(initialize)
        def initialize_and_note(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            initialize(optimizer, *args, **kwargs)
            self._without_step.add(optimizer)

        row = torch.optim.Optimizer, "__init__", initialize_and_note
        self._stack.enter_context(replaced(row))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def most_steps(self) -> int:
        """The steps of the optimizer that has made the most steps."""
        return max(self._steps_made.values(), default=0)

    @property
    def fewest_steps(self) -> int:
        """The steps of the optimizer that has made the fewest steps."""
        return 0 if self._without_step else min(self._steps_made.values(), default=0)

    def stepped(self, optimizer: Any = None, args: Any = (), kwargs: Any = None) -> None:
        """Count a step that an optimizer has made; None if a script changed weights by hand."""
        self._steps_made[id(optimizer)] += 1
        if optimizer is not None:
            self._without_step.discard(optimizer)
        # In a backward pass (an optimizer that steps in its hooks) the step's work is incomplete.
        if optimizer is not None and torch._C._current_graph_task_id() == -1:
            work = self.card.work.of_step
            backward = (part.flops * n for part, n in work.items() if part.phase == Phase.BACKWARD)
            self._operations[id(optimizer)].add(sum(backward))
        if self.fewest_steps >= self.steps or self.most_steps >= 3 * self.steps:
            self.enough_steps()

    def enough_steps(self) -> None:
        """End the script, by an exception."""
        # Now, as the optimizers without a step are gone once the script's names are.
        self._fewest = self.fewest_steps
        self.cut, self.trainer = True, self.trainer or _trainer_at_work()
        raise EnoughSteps

    def lines(self) -> Iterator[str]:
        """What did not run, and what that means for the figures, one line each."""
        if not self.most_steps:
            yield "nothing was trained: no optimizer has made a step"
        if self.most_steps == 1:
            yield "one step: the next one starts with the optimizer's states, and may need more"
        if not self.cut:
            return
        if self.differ and any(len(each) > 1 for each in self._operations.values()):
            yield (
                "the steps differ in size, as with texts of unequal length: a later one may need "
                f"more than these {self.most_steps} (--steps {max(25, 4 * self.most_steps)} runs "
                "more)"
            )
        if self._fewest < self.steps:
            yield (
                f"one optimizer has made {self._fewest} of these {self.most_steps} steps: its "
                f"next one may need more (--steps {2 * self.most_steps} runs more)"
            )
        yield from self._left()

    def _left(self) -> Iterator[str]:
        if self.trainer is None:
            yield "not run: what the script does after these steps, such as evaluation or saving"
            return
        left = ", ".join(left_to_do(self.trainer))
        if left:
            yield f"not run: {left}; --phases runs one of each"


class OneOfEach(Phases):
    """As `Phases`, but the Trainer trains on its longest texts, then evaluates and saves once.

    The Trainer's own code does so: callbacks ask it to evaluate and save after the last step. It
    evaluates on the longest texts, or on all texts if it keeps the predictions on the GPU. It saves
    into a temporary folder. Scripts without a Trainer end as under `Phases`.

    peaks: phase -> the most bytes reserved in it.
    """

    def __init__(self, card: SimulatedGPU, steps: int):
        super().__init__(card, steps)
        self.peaks: dict[str, int] = {}
        self._begun, self._is_enough = 0, False

    def __enter__(self) -> OneOfEach:
        from transformers import Trainer

        train, phases = Trainer.train, self

        def train_longest(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            phases.begin(trainer)
            return train(trainer, *args, **kwargs)

        super().__enter__()
        self._stack.enter_context(replaced((Trainer, "train", train_longest)))
        self._folder = tempfile.TemporaryDirectory()
        self._stack.enter_context(self._folder)
        return self

    def begin(self, trainer: Any) -> None:
        """Give a Trainer that is about to train its longest texts, and watch it."""
        # Steps on the longest texts are the worst ones, so differing sizes need no report.
        self.trainer, args, self.differ = trainer, trainer.args, False
        texts = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        trainer.train_dataset = longest_of(trainer.train_dataset, texts * self.steps)
        if not _keeps_predictions(trainer):
            texts = args.eval_batch_size * args.world_size * EVALUATED
            trainer.eval_dataset = longest_of(trainer.eval_dataset, texts)
        trainer.add_callback(_callback(self))

    def enough_steps(self) -> None:
        """End the script; with a Trainer, only after it has evaluated and saved."""
        if self.trainer is None:
            super().enough_steps()
        self._is_enough = True  # `ask` reads it when the Trainer reports the end of the step

    def ask(self, args: Any, control: Any) -> None:
        """At the end of the last step, ask the Trainer to evaluate and to save."""
        if not self._is_enough or TRAINING in self.peaks:
            return
        self.note(TRAINING)
        args.output_dir, args.push_to_hub = self._folder.name, False
        control.should_evaluate = self.trainer.eval_dataset is not None
        control.should_save = True

    def note(self, phase: str) -> None:
        """Note the peak of a phase that has just ended."""
        # `Tracer.peak` counts from `start`; set it to the beginning of the phase for a moment.
        tracer = self.card.tracer
        tracer.start, before = self._begun, tracer.start
        self.peaks[phase] = max(self.peaks.get(phase, 0), tracer.peak()[1])
        tracer.start, self._begun = before, len(tracer)

    def end(self) -> None:
        """End the script if all phases are over."""
        if self._is_enough and TRAINING in self.peaks:
            raise EnoughSteps

    def _left(self) -> Iterator[str]:
        yield from super()._left() if self.trainer is None else ()

    def lines(self) -> Iterator[str]:
        """As `Phases.lines`, with the most bytes that each phase reserved."""
        yield from super().lines()
        if self.trainer is None:
            yield "--phases: no Trainer of transformers was running, so nothing more was run"
        elif self.peaks:
            most = max(self.peaks.values())
            peaks = ", ".join(f"{name} {in_unit_of(n, most)}" for name, n in self.peaks.items())
            yield f"peak reserved, on the longest texts: {peaks}"


def _callback(phases: OneOfEach) -> Any:
    """A Trainer callback that reports the Trainer's progress to `phases`."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            phases.ask(args, control)

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            phases.note(EVALUATION)

        # The Trainer evaluates before it saves (`_maybe_log_save_evaluate`).
        def on_save(self, *_: Any, **__: Any) -> None:
            phases.note(SAVING)
            phases.end()

        # If the Trainer did not save, end before its next step.
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            phases.end()

        on_epoch_end = on_step_begin

    return Callback()


def _trainer_at_work() -> Any:
    """The transformers Trainer that has called this function from its loop, or None."""
    module = sys.modules.get("transformers.trainer")
    frame: FrameType | None = sys._getframe()
    while module and frame is not None:
        # Only a `self` that is a Trainer: a wrapper's `self` may be another object.
        own = frame.f_locals.get("self")
        if isinstance(own, module.Trainer):
            return own
        frame = frame.f_back
    return None


def left_to_do(trainer: Any) -> Iterator[str]:
    """The phases that a Trainer in the middle of its loop has still to run, in words."""
    # The state has the steps as whole numbers, the arguments may have them as shares of a training.
    args, state = trainer.args, trainer.state
    evaluated = any(name.startswith("eval_") for row in state.log_history for name in row)
    if trainer.eval_dataset is not None and not evaluated:
        text = f"evaluation {_when(args.eval_strategy, state.eval_steps)}"
        text += f" in batches of {args.eval_batch_size}"
        text += " with generation" * bool(getattr(args, "predict_with_generate", False))
        yield text + ", keeping all predictions on the card" * _keeps_predictions(trainer)
    saves = _name(args.save_strategy)
    if saves != "no" and not (saves == "steps" and state.global_step >= state.save_steps):
        yield f"saving {_when(args.save_strategy, state.save_steps)}"
    # A batch is padded to its longest text, so the worst batch is one of the longest texts.
    sizes = text_sizes(trainer.train_dataset)
    if sizes and min(sizes) < max(sizes):
        times = max(sizes) / max(1, statistics.median(sizes))
        yield f"batches of the longest text ({times:.1f} times the median)"


def _when(strategy: Any, steps: int) -> str:
    name = _name(strategy)
    if name == "steps":
        return f"every {steps} steps"
    return {"epoch": "after each epoch", "no": "on request"}.get(name, name)


def _name(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


def _keeps_predictions(trainer: Any) -> bool:
    """Whether an evaluation gathers the predictions of all its batches on the GPU.

    `Trainer.evaluation_loop` does so if metrics are computed at the end, unless it moves the
    predictions to the host every few batches (`eval_accumulation_steps`).
    """
    args = trainer.args
    gathers = trainer.compute_metrics is not None and not args.prediction_loss_only
    return bool(gathers and args.eval_accumulation_steps is None and not args.batch_eval_metrics)


def text_sizes(dataset: Any) -> list[int]:
    """The lengths of a data set's texts in tokens, or else in characters.

    At most `MOST_READ` lengths. Empty if the data set has no lengths to read.
    """
    try:
        if "input_ids" in (getattr(dataset, "column_names", None) or ()):
            return [len(ids) for ids in dataset[:MOST_READ]["input_ids"]]
        return [_size(dataset[i]) for i in range(min(len(dataset), MOST_READ))]
    except Exception:  # a data set without a length or an index may raise anything
        return []


def _size(item: Any) -> int:
    if not isinstance(item, Mapping):
        return 0
    ids = item.get("input_ids")
    if ids is not None:
        return len(ids)
    return sum(len(str(value)) for value in item.values() if isinstance(value, (str, list)))


def longest_of(dataset: Any, number: int) -> Any:
    """The `number` longest texts of a data set, or of each data set in a dictionary.

    The data set itself if the lengths of its texts are not known.
    """
    if isinstance(dataset, dict):
        return {name: longest_of(each, number) for name, each in dataset.items()}
    sizes = text_sizes(dataset)
    if not sizes:
        return dataset
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])[:number]
    if hasattr(dataset, "select"):
        return dataset.select(order)
    return torch.utils.data.Subset(dataset, order)
