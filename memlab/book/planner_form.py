"""The form around `plan`: choose a model, a card and what may change, press run, and read."""

from __future__ import annotations

import dataclasses
import html
import shlex

from memlab import models
from memlab.book.colours import COLOURS
from memlab.book.live import STYLE, Live
from memlab.card.links import LINKS
from memlab.footprint import Category
from memlab.gpus import GPUS
from memlab.planner.result import WAYS, Option, Plan, Question, described, way_in_words
from memlab.planner.search import plan
from memlab.units import gib

MISSING = COLOURS[Category.TEMPORARY]
HELD = COLOURS[Category.PARAMETERS]


class Planner(Live):
    """A form that asks `plan` again, in a live notebook.

    answer: a plan for one card, which is shown first; its question is what the form begins with.
    Without a kernel the form is a still picture of that answer. Raises ValueError for a plan of a
    model or a card without a name.
    """

    doing = "planning"

    def __init__(self, answer: Plan):
        super().__init__()
        if not isinstance(answer.question.model, str) or answer.card.name not in GPUS:
            raise ValueError("a form needs a plan of a model with a name on a card with a name")
        self.answer = answer

    def __repr__(self) -> str:
        return f"Planner({self.command})"

    @property
    def command(self) -> str:
        """The command that asks the same and writes the script."""
        asked, first = self.answer.question, Question(self.answer.question.model)
        words = ["memlab", "plan", "--model", asked.model, "--gpu", self.answer.card.name]
        for name in ("seq_len", "effective_batch", "lora_rank", "ranks", "link"):
            if getattr(asked, name) != getattr(first, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(asked, name))]
        for name in ("ways", "precisions"):
            if getattr(asked, name) != getattr(first, name):
                words += [f"--{name}", ",".join(getattr(asked, name))]
        if asked.task != first.task:
            words += ["--task", asked.task]
        if not asked.keep_quality:
            words.append("--any-quality")
        if asked.expandable_segments:
            words.append("--expandable-segments")
        # A script is for one card.
        return shlex.join([*words, *(["--script", "train.py"] if asked.ranks == 1 else [])])

    @staticmethod
    def work(question: Question, card: str) -> Plan:
        """What the process of a run does."""
        return plan(gpu=card, **vars(question))

    def begin(self) -> None:
        """Show the answer that is there."""
        self.finish(self.answer.question, self.answer.card.name, self.answer)

    def controls(self, widgets, **look) -> list:
        """One for each part of the question, and one for the card."""
        asked = self.answer.question
        named = [name for name in models.MODELS if not name.endswith("-tiny")]
        self._model = widgets.Combobox(
            value=asked.model, options=named, description="model", **look
        )
        self._gpu = widgets.Dropdown(
            options=list(GPUS), value=self.answer.card.name, description="card", **look
        )
        self._numbers = {
            name: widgets.IntText(value=getattr(asked, name), description=words, **look)
            for name, words in (
                ("seq_len", "tokens"),
                ("effective_batch", "effective batch"),
                ("lora_rank", "rank of LoRA"),
                ("ranks", "cards"),
            )
        }
        self._link = widgets.Dropdown(
            options=[("the card's own", None), *((name, name) for name in LINKS)],
            value=asked.link,
            description="link between them",
            **look,
        )
        self._ways = {
            way: widgets.Checkbox(value=way in asked.ways, description=words, **look)
            for way, words in WAYS.items()
        }
        self._quality = widgets.Checkbox(
            value=asked.keep_quality, description="only what trains as well", **look
        )
        return [
            self._model,
            self._gpu,
            *self._numbers.values(),
            self._link,
            *self._ways.values(),
            self._quality,
        ]

    def asked(self) -> tuple[Question, str]:
        """The question that the form says, and the card; raises ValueError as `Question` does."""
        numbers = {name: one.value for name, one in self._numbers.items()}
        ways = tuple(way for way, one in self._ways.items() if one.value)
        changed = {"model": self._model.value, "ways": ways, "keep_quality": self._quality.value}
        changed["link"] = self._link.value
        question = dataclasses.replace(self.answer.question, **changed, **numbers)
        return question, self._gpu.value

    def is_shown(self, question: Question, card: str) -> bool:
        """Whether the answer in sight is one to this question."""
        return (question, card) == (self.answer.question, self.answer.card.name)

    def finish(self, question: Question, card: str, answer: Plan) -> None:
        """Show an answer in the place of the one before."""
        self.answer = answer
        self.show(picture(answer), self.command)

    def still(self) -> str:
        """The form without controls, as HTML: the answer, and the question that it answers."""
        asked = self.answer.question
        chosen = {
            "model": asked.model,
            "card": self.answer.card.name,
            "tokens": f"{asked.seq_len:,}",
            "effective batch": f"{asked.effective_batch:,}",
            "cards": f"{asked.ranks:,}",
            "link between them": asked.link or "the card's own",
            "ways": ", ".join(WAYS[way] for way in asked.ways),
        }
        rows = "".join(
            f"<tr><td>{name}</td><td><b>{html.escape(value)}</b></td></tr>"
            for name, value in chosen.items()
        )
        return (
            f'{STYLE}<div class="memlab-explore still"><p><b>A still picture.</b> In a notebook '
            "with ipywidgets (Colab, Kaggle, JupyterLab) this is a form, and every question is "
            f"answered there.</p><table>{rows}</table>{picture(self.answer)}"
            f"<pre>{html.escape(self.command)}</pre></div>"
        )


def picture(answer: Plan) -> str:
    """What a plan says, as HTML: the best, a bar for each tier, the decision."""
    if answer:
        best = f"<b>First that fits:</b> {described(answer.first.recipe)}.<br>"
        best += f"<b>Fastest that fits:</b> {described(answer.fastest.recipe)}."
        best += f"<br>{answer.fastest.sizes()}" if answer.fastest.longest is not None else ""
        if answer.roomiest.recipe != answer.fastest.recipe:
            best += f"<br><b>With the most room:</b> {described(answer.roomiest.recipe)}."
    else:
        best = "<br>".join(["<b>Nothing fits.</b> What would:", *map(html.escape, answer.remedies)])
    bars = "".join(_bar(option) for option in answer.tiers.values())
    return f"<p>{best}</p>{bars}<p>{html.escape(' '.join(answer.decision))}</p>"


def _bar(option: Option) -> str:
    """The best of a tier: its recipe, and a bar of what it needs against the card."""
    widest = max(option.needed, option.total_memory)
    end = f'<div class="end" style="left:{min(option.total_memory / widest, 0.997):.2%}"></div>'
    return (
        f'<div class="run"><b>Tier {option.tier}: {WAYS[option.way]}</b>, '
        f"{described(option.recipe).removeprefix(way_in_words(option.recipe) + ', ')}<br>"
        f"{html.escape(option.bytes_and_seconds())}"
        f'<div class="bar" role="img" aria-label="{gib(option.needed)} of '
        f'{gib(option.total_memory)}"><div style="width:{option.needed / widest:.2%};'
        f'background:{MISSING if option.missing else HELD}"></div>{end}</div></div>'
    )
