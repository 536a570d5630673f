"""The ledger: every statement of the sources, with the verdicts that the chapters' cells reached.

A cell that ends in `verdict(...)` leaves its verdict as data beside its output, and so does one
that ends in `named(...)`, of what a source only names. The directive `ledger` reads them from the
executed notebooks and writes the tables: nothing is typed again.

    :::{ledger}
    :open: B26 B27
    :::

`open` names the statements that no chapter takes up yet; a cell, too, may say that it cannot
decide one. Any other statement without a verdict is
a warning, and so are two verdicts that differ, one that is not the expected one of claims.json
(unless it rests on a clock), an open statement that has one, and a named subject of which no cell
shows anything. The build treats warnings as errors.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from docutils import nodes
from docutils.parsers.rst import directives
from markdown_it import MarkdownIt
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from memlab.book.claims import WORDS, all_claims, all_named, sources

OPEN = WORDS[-1]
MARKS = dict(zip(WORDS, "✓◐✗○", strict=True))
CALL = re.compile(r'\b(?:verdict|named)\(\s*"(\w+)"')
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What a cell of an executed notebook says of a statement; `word` is None if it says nothing.

    page: the notebook's name in the book; cell: the cell's id; index: its place in the notebook.
    """

    id: str
    page: str
    cell: str
    index: int
    word: str | None = None
    because: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.split('/')[-1]}.ipynb, cell {self.cell}"


def decisions(notebook: Path, page: str) -> list[Decision]:
    """Of every cell that calls `verdict` or `named` or shows one, in the order of the cells."""
    found = []
    for index, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "code":
            continue
        shown = [o.get("metadata", {}).get("text/markdown", {}) for o in cell["outputs"]]
        said = [metadata["verdict"] for metadata in shown if "verdict" in metadata]
        called = CALL.findall("".join(cell["source"]))
        silent = [{"id": id} for id in called if id not in {one["id"] for one in said}]
        found += [Decision(page=page, cell=cell["id"], index=index, **one) for one in said + silent]
    return found


def rests_on_a_clock(claim: dict) -> bool:
    """Whether seconds measured on this machine decide the statement."""
    return "clock" in claim or ("gpu_clock" in claim and torch.cuda.is_available())


def problems(found: list[Decision], left_open: list[str]) -> list[str]:
    """One line a statement: without a verdict, with two, an unexpected one, or open no more.

    A verdict that rests on a clock may be another on another machine: see `all_claims`.
    """
    known = all_claims()
    lines = [f"{id} is listed as open and is no statement" for id in left_open if id not in known]
    for id in (*known, *all_named()):
        here = [one for one in found if one.id == id]
        said = [one for one in here if one.word]
        cells = "; ".join(f"{one.place}: {one.word or 'nothing'}" for one in here) or "in no cell"
        if id in left_open and here:
            lines.append(f"{id} is listed as open and is decided ({cells})")
        elif id not in left_open and not said:
            what = "verdict" if id in known else "cell that shows something of it"
            lines.append(f"{id} has no {what} ({cells})")
        elif len({one.word for one in said}) > 1:
            lines.append(f"{id} has verdicts that differ ({cells})")
        elif id in known and said and not rests_on_a_clock(known[id]):
            expected, word = known[id]["word"], said[0].word
            if word != expected:
                lines.append(f"{id} is expected to be {expected!r} and is {word!r} ({cells})")
    return lines


def tally(words: dict[str, str]) -> str:
    """The table that counts the statements of each source by verdict. words: id -> verdict."""
    head = "".join(f"<th>{MARKS[word]} {word}</th>" for word in MARKS)
    lines = [f"<thead><tr><th>source</th><th>all</th>{head}</tr></thead><tbody>"]
    rows = [(f"{letter}: {s['title']} ({s['form']})", letter) for letter, s in sources().items()]
    for name, letter in [*rows, ("all five", "")]:
        count = Counter(word for id, word in words.items() if id.startswith(letter))
        numbers = [count.total(), *(count[word] for word in MARKS)]
        cells = "".join(f"<td>{number}</td>" for number in numbers)
        lines.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    return '<table class="tally">' + "\n".join(lines) + "</tbody></table>"


def table(found: list[Decision], link) -> str:
    """The table of all statements. link(decision): the HTML that leads to its cell."""
    inline = MarkdownIt().renderInline
    pages = sorted({one.page for one in found})
    head = "<th>No.</th><th>The source says</th><th>Verdict, why, and the cell that decided</th>"
    lines = [f"<thead><tr>{head}</tr></thead><tbody>"]
    last = None
    for id, claim in all_claims().items():
        if id[0] != last:
            last = id[0]
            lines.append(f'<tr class="source"><th colspan="3">{last}: {claim["source"]}</th></tr>')
        here = [one for one in found if one.id == id and one.word]
        word = here[0].word if here else OPEN
        why = "<br>".join(f"{inline(one.because)}<br>{link(one)}" for one in here)
        chapter = pages.index(here[0].page) if here else len(pages)
        lines.append(
            f'<tr id="statement-{id}" data-verdict="{list(MARKS).index(word)}" '
            f'data-chapter="{chapter}"><td>{id}</td><td>{escape(claim["says"])}</td>'
            f"<td><b>{MARKS[word]} {word.capitalize()}</b>: "
            f"{why or 'no chapter decides it yet.'}</td></tr>"
        )
    return '<table class="ledger">' + "\n".join(lines) + "</tbody></table>"


def named_table(found: list[Decision], link) -> str:
    """The table of what the sources only name. link(decision): the HTML that leads to its cell."""
    inline = MarkdownIt().renderInline
    lines = [
        "<thead><tr><th>Named, not claimed</th><th>What this book shows of it</th></tr></thead>"
    ]
    for id, one in all_named().items():
        shown = "<br>".join(
            f"{inline(here.because)}<br>{link(here)}" for here in found if here.id == id
        )
        says = f"<b>{id}</b>, {escape(one['says'])} ({escape(one['source'])})"
        lines.append(f'<tr id="named-{id.lower()}"><td>{says}</td><td>{shown}</td></tr>')
    return '<table class="named">' + "\n".join(lines) + "</table>"


class ledger(nodes.General, nodes.Element):
    """Where the tables go once every notebook has been read."""


class LedgerDirective(SphinxDirective):
    option_spec = {"open": directives.unchanged}

    def run(self):
        node = ledger(open=self.options.get("open", "").split())
        self.set_source_info(node)
        return [node]


def anchor(decision: Decision) -> str:
    return f"claim-{decision.id.lower()}"


def decisions_of(env, page: str) -> list[Decision]:
    """Of a page of the book: MyST-NB keeps every executed notebook in its output folder."""
    if Path(env.doc2path(page)).suffix != ".ipynb":
        return []
    return decisions(Path(env.mystnb_config.output_folder) / f"{page}.ipynb", page)


def mark_cells(app, doctree):
    """Every cell with a verdict can be linked to."""
    marks = {one.index: anchor(one) for one in decisions_of(app.env, app.env.docname)}
    for cell in doctree.findall(nodes.container):
        if cell.get("cell_index") in marks:
            cell["ids"].append(marks[cell["cell_index"]])


def write_ledger(app, doctree, docname):
    env = app.env

    def link(one):
        number = ".".join(map(str, env.toc_secnumbers.get(one.page, {}).get("", ())))
        title = escape(f"{number} {env.titles[one.page].astext()}".strip())
        uri = app.builder.get_relative_uri(docname, one.page)
        return f'<a href="{uri}#{anchor(one)}">{title}</a> <span class="place">{one.place}</span>'

    for node in list(doctree.findall(ledger)):
        found = [one for page in sorted(env.found_docs) for one in decisions_of(env, page)]
        for line in problems(found, node["open"]):
            logger.warning("%s", line, location=node, type="book")
        words = {id: OPEN for id in all_claims()}
        words |= {one.id: one.word for one in found if one.word and one.id in words}
        html = f"{tally(words)}\n{table(found, link)}\n{named_table(found, link)}"
        node.replace_self(nodes.raw("", html, format="html"))


def setup(app):
    app.add_node(ledger)
    app.add_directive("ledger", LedgerDirective)
    app.connect("doctree-read", mark_cells)
    app.connect("doctree-resolved", write_ledger)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
