"""The panel of `explore`: choose switches of a recipe, press run, and see its bytes on a card.

A `Serving` is shown as a `Recipe` is: both have fields that say what they may hold.
"""

from __future__ import annotations

import dataclasses
import html
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memlab import models
from memlab.book.colours import SERVING_COLOURS
from memlab.book.live import STYLE, Live
from memlab.export.memlab_lines import command_line, memlab_lines
from memlab.fields import without_effect
from memlab.gpus import GPUS, find_gpu
from memlab.predict.fit import fits
from memlab.spec.recipe import Recipe
from memlab.spec.serving import TASKS, Serving
from memlab.units import in_unit_of

if TYPE_CHECKING:
    from ipywidgets import Widget

REST = "#e4e4e4"  # lighter than the greys of `COLOURS`
KEPT = 5  # runs that stay in sight
LENGTHS = ("seq_len", "prompt")  # fields that end where the model's positions do


def explore(recipe: Recipe | Serving, *switches: str, gpu: str = "T4") -> Explorer:
    """A panel on which a reader changes a recipe and simulates it, in a live notebook.

    recipe: of a training, or a `Serving`. switches: names of its fields that get a control.
    gpu: a name of `memlab.gpus.GPUS`, which the panel can change.

    The recipe itself is simulated when the panel is shown. Without a kernel the panel is a still
    picture of that run. Raises ValueError for an unknown field or card.
    """
    return Explorer(recipe, switches, find_gpu(gpu).name)


@dataclass(frozen=True)
class Run:
    """What is shown of a simulated recipe on a card: lines, and bytes by what they are for.

    needed, total: bytes of the card that it asks for, context included, and those that it has.
    """

    recipe: Recipe | Serving
    card: str
    lines: tuple[str, ...]
    held: dict[str, int]
    needed: int
    total: int


class Explorer(Live):
    """Controls, bars, the phase of the peak, and what to copy."""

    doing = "simulating"

    def __init__(self, recipe: Recipe | Serving, switches: tuple[str, ...], card: str):
        super().__init__()
        if card not in GPUS:
            raise ValueError(f"gpu is {card!r}: allowed are {', '.join(GPUS)}")
        known, kind = {one.name: one for one in dataclasses.fields(recipe)}, type(recipe).__name__
        for name in switches:
            if name not in known:
                allowed = ", ".join(known)
                raise ValueError(f"a {kind.lower()} has no field {name!r}: allowed are {allowed}")
        self.recipe, self.card = recipe, card
        self.fields = [known[name] for name in switches]
        self.runs: list[Run] = []

    def __repr__(self) -> str:
        return f"explore({self.recipe}, {', '.join(one.name for one in self.fields)})"

    @staticmethod
    def work(recipe: Recipe | Serving, card: str) -> Run:
        """What the process of a run does. The footprint is left there: it can be large."""
        fit = fits(recipe, card)
        found = fit.footprint
        allocated = in_unit_of(found.peak_allocated, fit.total_memory)
        peak = f"peak allocated {allocated}, in {found.peak_phase}"
        times = [f"{what}, estimated: {time}" for what, time in found.times.items()]
        assumed = [f"assumed: {line}" for line in found.assumptions]
        lines = (str(fit), peak, *times, *assumed)
        held: dict[str, int] = {name: n for name, n in found.breakdown.items()}
        return Run(recipe, card, lines, held, fit.needed, fit.total_memory)

    def begin(self) -> None:
        """Simulate the recipe itself."""
        self.finish(self.recipe, self.card, self.work(self.recipe, self.card))

    def still(self) -> str:
        """The panel without controls, as HTML: the first run and what could be chosen."""
        chosen = "".join(
            f"<tr><td>{_words(one.name)}</td><td><b>{html.escape(_text(value) or '—')}</b></td>"
            f"<td>{html.escape(_others(self.recipe, one))}</td></tr>"
            for one in self.fields
            for value in [getattr(self.recipe, one.name)]
        )
        return (
            f'{STYLE}<div class="memlab-explore still"><p><b>A still picture.</b> In a notebook '
            "with ipywidgets (Colab, Kaggle, JupyterLab) these are controls, and every run is "
            "simulated there.</p>"
            f"<table>{chosen}</table>{self._picture(self.runs[:1])}</div>"
        )

    def _picture(self, runs: list[Run]) -> str:
        widest = max(max(run.needed, run.total) for run in runs)
        return "".join(_bar(_changes(self.recipe, run.recipe), run, widest) for run in runs)

    def controls(self, widgets: ModuleType, **look: Any) -> list[Widget]:
        """One for each field, and one for the card."""
        self._controls = {
            one.name: _control(widgets, self.recipe, one, **look) for one in self.fields
        }
        self._gpu = widgets.Dropdown(
            options=list(GPUS), value=self.card, description="card", **look
        )
        return [*self._controls.values(), self._gpu]

    def chosen(self) -> Recipe | Serving:
        """The recipe that the controls say; raises ValueError as its class does.

        A control has no say while another one leaves it without an effect.
        """
        values = {name: one.value for name, one in self._controls.items()}
        free = {one.name: values[one.name] for one in self.fields if not one.metadata["needs"]}
        return self.recipe.but(**values | without_effect(self.recipe, free))

    def asked(self) -> tuple[Recipe | Serving, str]:
        """The recipe and the card that the controls say."""
        return self.chosen(), self._gpu.value

    def is_shown(self, recipe: Recipe | Serving, card: str) -> bool:
        """Whether the run is one of those in sight."""
        return (recipe, card) in [(run.recipe, run.card) for run in self.runs]

    def finish(self, recipe: Recipe | Serving, card: str, run: Run) -> None:
        """Show a run beside those before it."""
        self.runs = [*self.runs[-KEPT + 1 :], run]
        line = [command_line(recipe, card)] if isinstance(recipe.model, str) else []
        self.show(self._picture(self.runs), *line, memlab_lines(recipe, card, "fits"))


# ---------------------------------------------------------------------- controls of the fields


def _choices(recipe: Recipe | Serving, one: dataclasses.Field[Any]) -> list[Any] | None:
    """The values among which a field is chosen; None for one that is typed in."""
    value, choices = getattr(recipe, one.name), one.metadata["choices"]
    if one.name == "model":
        tasks = TASKS if isinstance(recipe, Serving) else models.TASKS
        named = [name for name in models.MODELS if not name.endswith("-tiny")]
        named = [name for name in named if models.default_task(name) in tasks]
        return named if value in named else [value, *named]
    if choices:
        return list(choices)
    if isinstance(value, int) and not isinstance(value, bool):
        most = models.max_length(recipe.model) if one.name in LENGTHS else None
        powers = [2**i for i in range(18) if 2**i <= max(most or 256, value)]
        return sorted({one.default, value, *powers})
    return None


def _control(
    widgets: ModuleType, recipe: Recipe | Serving, one: dataclasses.Field[Any], **look: Any
) -> Widget:
    """The widget of a field: a box to tick, a list, a slider of powers of two, a number, a text."""
    value, choices = getattr(recipe, one.name), _choices(recipe, one)
    look["description"] = _words(one.name)
    look["description_tooltip"] = one.metadata["help"]
    if isinstance(value, bool):
        return widgets.Checkbox(value=value, indent=True, **look)
    if isinstance(value, float):
        return widgets.FloatText(value=value, step=0.05, **look)
    if choices is None:
        return widgets.Text(value=_text(value), continuous_update=False, **look)
    options = [(_text(choice), choice) for choice in choices]
    if isinstance(value, int):
        return widgets.SelectionSlider(options=options, value=value, **look)
    return widgets.Dropdown(options=options, value=value, **look)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: object) -> str:
    """A field's value as a reader would type it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return getattr(value, "model_type", str(value))


def _others(recipe: Recipe | Serving, one: dataclasses.Field[Any]) -> str:
    """What else a field could be, in a few words."""
    choices = _choices(recipe, one)
    if choices is None:
        return one.metadata["help"]
    value = getattr(recipe, one.name)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"from {choices[0]:,} to {choices[-1]:,}"
    return "or " + ", ".join(_text(choice) for choice in choices if choice != value)


# ---------------------------------------------------------------------- what a run looks like


def _changes(first: Recipe | Serving, recipe: Recipe | Serving) -> str:
    """What a recipe has that the first one had not."""
    pairs = ((one.name, getattr(recipe, one.name)) for one in dataclasses.fields(recipe))
    changed = [f"{_words(n)} {_text(value)}" for n, value in pairs if value != getattr(first, n)]
    return ", ".join(changed) or "as given"


def _bar(label: str, run: Run, widest: int) -> str:
    """One run: its name, what it says, and a bar against the card."""
    held = {name: n for name, n in run.held.items() if n > 0.002 * widest}
    rest = run.needed - sum(held.values())
    pieces = [(_words(name), n, SERVING_COLOURS[name]) for name, n in held.items()]
    pieces.append(("allocator's cache, context, the rest", rest, REST))

    def sized(nbytes: int) -> str:
        return in_unit_of(nbytes, run.total)

    bar = "".join(
        f'<div style="width:{n / widest:.2%};background:{colour}" title="{name}: {sized(n)}"></div>'
        for name, n, colour in pieces
    )
    key = "".join(
        f'<span><i style="background:{colour}"></i>{name} {sized(n)}</span> '
        for name, n, colour in pieces
    )
    end = f'<div class="end" style="left:{min(run.total / widest, 0.997):.2%}"></div>'
    return (
        f'<div class="run"><b>{html.escape(label)}</b> on {run.card}: '
        f"{'<br>'.join(map(html.escape, run.lines))}"
        f'<div class="bar" role="img" aria-label="{sized(run.needed)} of {sized(run.total)}">'
        f'{bar}{end}</div><div class="key">{key}</div></div>'
    )
