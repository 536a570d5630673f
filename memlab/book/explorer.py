"""The panel of `explore`: choose switches of a recipe, press run, and see its bytes on a card."""

from __future__ import annotations

import dataclasses
import html

from memlab import models
from memlab.book.live import STYLE, Live
from memlab.gpus import GPUS, find_gpu
from memlab.planning import Fit, fits
from memlab.recipe import Recipe
from memlab.units import mib

REST = "#e4e4e4"  # lighter than the greys of `show.COLOURS`
KEPT = 5  # runs that stay in sight


def explore(recipe: Recipe, *switches: str, gpu: str = "T4") -> Explorer:
    """A panel on which a reader changes a recipe and simulates it, in a live notebook.

    switches: names of the recipe's fields that get a control. gpu: a name of `memlab.gpus.GPUS`,
    which the panel can change.

    The recipe itself is simulated when the panel is shown. Without a kernel the panel is a still
    picture of that run. Raises ValueError for an unknown field or card.
    """
    return Explorer(recipe, switches, find_gpu(gpu).name)


class Explorer(Live):
    """Controls, bars, the phase of the peak, and the code."""

    doing = "simulating"

    def __init__(self, recipe: Recipe, switches: tuple[str, ...], card: str):
        super().__init__()
        if card not in GPUS:
            raise ValueError(f"gpu is {card!r}: allowed are {', '.join(GPUS)}")
        known = {one.name: one for one in dataclasses.fields(Recipe)}
        for name in switches:
            if name not in known:
                raise ValueError(f"a recipe has no field {name!r}: allowed are {', '.join(known)}")
        self.recipe, self.card = recipe, card
        self.fields = [known[name] for name in switches]
        self.runs: list[tuple[Recipe, str, Fit]] = []

    def __repr__(self) -> str:
        return f"explore({self.recipe}, {', '.join(one.name for one in self.fields)})"

    @staticmethod
    def work(recipe: Recipe, card: str) -> Fit:
        """What the process of a run does. The timeline is left there: it can be large."""
        fit = fits(recipe, card)
        return dataclasses.replace(fit, footprint=dataclasses.replace(fit.footprint, timeline=None))

    def begin(self) -> None:
        """Simulate the recipe itself."""
        self.finish(self.recipe, self.card, fits(self.recipe, self.card))

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

    def _picture(self, runs) -> str:
        first = self.recipe
        widest = max(max(fit.needed, fit.total_memory) for _, _, fit in runs)
        return "".join(
            _bar(_changes(first, recipe), card, fit, widest) for recipe, card, fit in runs
        )

    def controls(self, widgets, **look) -> list:
        """One for each field, and one for the card."""
        self._controls = {
            one.name: _control(widgets, self.recipe, one, **look) for one in self.fields
        }
        self._gpu = widgets.Dropdown(
            options=list(GPUS), value=self.card, description="card", **look
        )
        return [*self._controls.values(), self._gpu]

    def chosen(self) -> Recipe:
        """The recipe that the controls say; raises ValueError as `Recipe` does."""
        return self.recipe.but(**{name: one.value for name, one in self._controls.items()})

    def asked(self) -> tuple[Recipe, str]:
        """The recipe and the card that the controls say."""
        return self.chosen(), self._gpu.value

    def is_shown(self, recipe: Recipe, card: str) -> bool:
        """Whether the run is one of those in sight."""
        return (recipe, card) in [(one, there) for one, there, _ in self.runs]

    def finish(self, recipe: Recipe, card: str, fit: Fit) -> None:
        """Show a run beside those before it."""
        self.runs = [*self.runs[-KEPT + 1 :], (recipe, card, fit)]
        self.show(self._picture(self.runs), _code(recipe, card))


# ---------------------------------------------------------------------- controls of the fields


def _choices(recipe: Recipe, one: dataclasses.Field) -> list | None:
    """The values among which a field is chosen; None for one that is typed in."""
    value, choices = getattr(recipe, one.name), one.metadata["choices"]
    if one.name == "model":
        named = [name for name in models.MODELS if not name.endswith("-tiny")]
        return named if value in named else [value, *named]
    if choices:
        return list(choices)
    if isinstance(value, int) and not isinstance(value, bool):
        most = models.max_length(models.config(recipe.model)) if one.name == "seq_len" else None
        powers = [2**i for i in range(18) if 2**i <= max(most or 256, value)]
        return sorted({one.default, value, *powers})
    return None


def _control(widgets, recipe: Recipe, one: dataclasses.Field, **look):
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


def _text(value) -> str:
    """A field's value as a reader would type it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return getattr(value, "model_type", str(value))


def _others(recipe: Recipe, one: dataclasses.Field) -> str:
    """What else a field could be, in a few words."""
    choices = _choices(recipe, one)
    if choices is None:
        return one.metadata["help"]
    value = getattr(recipe, one.name)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"from {choices[0]:,} to {choices[-1]:,}"
    return "or " + ", ".join(_text(choice) for choice in choices if choice != value)


# ---------------------------------------------------------------------- what a run looks like


def _changes(first: Recipe, recipe: Recipe) -> str:
    """What a recipe has that the first one had not."""
    pairs = ((one.name, getattr(recipe, one.name)) for one in dataclasses.fields(recipe))
    changed = [f"{_words(n)} {_text(value)}" for n, value in pairs if value != getattr(first, n)]
    return ", ".join(changed) or "as given"


def _bar(label: str, card: str, fit: Fit, widest: int) -> str:
    """One run: its name, a bar against the card, and what it says."""
    from memlab.book.show import COLOURS

    footprint = fit.footprint
    held = {name: n for name, n in footprint.breakdown.items() if n > 0.002 * widest}
    rest = fit.needed - sum(held.values())
    pieces = [(_words(name), n, COLOURS[name]) for name, n in held.items()]
    pieces.append(("allocator's cache, context, the rest", rest, REST))
    bar = "".join(
        f'<div style="width:{n / widest:.2%};background:{colour}" title="{name}: {mib(n)}"></div>'
        for name, n, colour in pieces
        if n > 0
    )
    key = "".join(
        f'<span><i style="background:{colour}"></i>{name} {mib(n)}</span> '
        for name, n, colour in pieces
        if n > 0
    )
    end = f'<div class="end" style="left:{min(fit.total_memory / widest, 0.997):.2%}"></div>'
    time = f"<br>a step, estimated: {footprint.step_time}" if footprint.step_time else ""
    assumed = "".join(f"<br>assumed: {html.escape(line)}" for line in footprint.assumptions)
    return (
        f'<div class="run"><b>{html.escape(label)}</b> on {card}: '
        f"{html.escape(str(fit))}<br>peak allocated {mib(footprint.peak_allocated)}, "
        f"in {footprint.peak_phase}{time}{assumed}"
        f'<div class="bar" role="img" aria-label="{mib(fit.needed)} of {mib(fit.total_memory)}">'
        f'{bar}{end}</div><div class="key">{key}</div></div>'
    )


def _code(recipe: Recipe, card: str) -> str:
    """Python that repeats a run."""
    given = [f'"{recipe.model}"' if isinstance(recipe.model, str) else "config"]
    given += [
        f"{one.name}={_literal(getattr(recipe, one.name))}"
        for one in dataclasses.fields(recipe)
        if one.name not in ("model", "task") and getattr(recipe, one.name) != one.default
    ]
    return f'print(fits(Recipe({", ".join(given)}), "{card}"))'


def _literal(value) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
