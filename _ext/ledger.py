"""Sphinx extension: the ledger, a table of all statements of the sources with their verdicts.

The chapters give their verdicts in folds of their text (`memlab.book.claims`). They treat subjects
that a source only names in the same way. The directive `ledger` collects all folds and writes the
tables, so that no verdict is typed twice.

    :::{ledger}
    :open: B26 B27
    :::

`open` lists the statements that no chapter takes up yet. The build treats warnings as errors, and
these are warnings:

- a statement without a verdict that is not listed as open, and a listed one with a verdict;
- two verdicts on one statement that differ, and a verdict that is none of the known words;
- a statement that is cited in other words than those of claims.json;
- a named subject that no fold takes up.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from markdown_it import MarkdownIt
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from memlab.book.claims import (
    CLAIMS,
    MARKS,
    NAMED,
    SOURCES,
    SUBJECTS,
    WORDS,
    Verdict,
    verdicts,
)

OPEN = WORDS[-1]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """A verdict and its place: the notebook's document name in the book, and the cell's id."""

    verdict: Verdict
    page: str
    cell: str

    @property
    def id(self) -> str:
        return self.verdict.id

    @property
    def word(self) -> str:
        return self.verdict.word

    @property
    def place(self) -> str:
        return f"{self.page.split('/')[-1]}.ipynb, cell {self.cell}"


def decisions(notebook: Path, page: str) -> list[Decision]:
    """The verdicts in the Markdown cells of a notebook, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [
        Decision(one, page, cell["id"])
        for cell in cells
        if cell["cell_type"] == "markdown"
        for one in verdicts("".join(cell["source"]))
    ]


def problems(found: list[Decision], left_open: list[str]) -> list[str]:
    """One line per problem with a statement, as the module's docstring lists them."""
    # Subjects that are only named have the same folds, with the word NAMED as the verdict.
    known = CLAIMS
    cited = {id: (one["says"], one["source"]) for id, one in (known | SUBJECTS).items()}
    lines = [f"{id} is listed as open and is no statement" for id in left_open if id not in known]
    lines += [f"{one.id} is no statement ({one.place})" for one in found if one.id not in cited]
    for id, (says, source) in cited.items():
        here = [one for one in found if one.id == id]
        words = {one.word for one in here}
        cells = "; ".join(f"{one.place}: {one.word}" for one in here) or "in no cell"
        if id in left_open and here:
            lines.append(f"{id} is listed as open and is decided ({cells})")
        elif id not in left_open and not here:
            what = "verdict" if id in known else "cell that shows something of it"
            lines.append(f"{id} has no {what} ({cells})")
        elif len(words) > 1:
            lines.append(f"{id} has verdicts that differ ({cells})")
        elif words - set(WORDS if id in known else [NAMED]):
            lines.append(f"{id} has a verdict of another word ({cells})")
        elif any((one.verdict.says, one.verdict.source) != (says, source) for one in here):
            lines.append(f"{id} is cited in other words than those of claims.json ({cells})")
    return lines


def tally(words: dict[str, str]) -> str:
    """The HTML table that counts each source's statements by verdict. words: id -> verdict."""
    head = "".join(f"<th>{MARKS[word]} {word}</th>" for word in MARKS)
    lines = [f"<thead><tr><th>source</th><th>all</th>{head}</tr></thead><tbody>"]
    rows = [(f"{letter}: {s['title']} ({s['form']})", letter) for letter, s in SOURCES.items()]
    for name, letter in [*rows, ("all five", "")]:
        count = Counter(word for id, word in words.items() if id.startswith(letter))
        numbers = [count.total(), *(count[word] for word in MARKS)]
        cells = "".join(f"<td>{number}</td>" for number in numbers)
        lines.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    return '<table class="tally">' + "\n".join(lines) + "</tbody></table>"


def inline(text: str) -> str:
    """Inline Markdown as HTML; links to notebooks become links to their pages."""
    return re.sub(r'(href="[\w-]+)\.ipynb', r"\1.html", MarkdownIt().renderInline(text))


def table(found: list[Decision], link) -> str:
    """The HTML table of all statements. link(decision): the HTML of a link to its cell."""
    pages = sorted({one.page for one in found})
    head = "<th>No.</th><th>The source says</th><th>Verdict, why, and the cell that decided</th>"
    lines = [f"<thead><tr>{head}</tr></thead><tbody>"]
    last = None
    for id, claim in CLAIMS.items():
        if id[0] != last:
            last = id[0]
            lines.append(f'<tr class="source"><th colspan="3">{last}: {claim["source"]}</th></tr>')
        here = [one for one in found if one.id == id]
        word = here[0].word if here else OPEN
        why = "<br>".join(f"{inline(one.verdict.because)}<br>{link(one)}" for one in here)
        chapter = pages.index(here[0].page) if here else len(pages)
        # The page's script sorts the rows by these two data attributes.
        lines.append(
            f'<tr id="statement-{id}" data-verdict="{list(MARKS).index(word)}" '
            f'data-chapter="{chapter}"><td>{id}</td><td>{escape(claim["says"])}</td>'
            f"<td><b>{MARKS[word]} {word.capitalize()}</b>: "
            f"{why or 'no chapter decides it yet.'}</td></tr>"
        )
    return '<table class="ledger">' + "\n".join(lines) + "</tbody></table>"


def named_table(found: list[Decision], link) -> str:
    """The HTML table of subjects that sources only name. link(decision): a link to its cell."""
    lines = [
        "<thead><tr><th>Named, not claimed</th><th>What this book shows of it</th></tr></thead>"
    ]
    for id, one in SUBJECTS.items():
        shown = "<br>".join(
            f"{inline(here.verdict.because)}<br>{link(here)}" for here in found if here.id == id
        )
        says = f"<b>{id}</b>, {escape(one['says'])} ({escape(one['source'])})"
        lines.append(f'<tr id="named-{id.lower()}"><td>{says}</td><td>{shown}</td></tr>')
    return '<table class="named">' + "\n".join(lines) + "</table>"


class ledger(nodes.General, nodes.Element):
    """A placeholder node, replaced by the tables once all notebooks have been read."""


class LedgerDirective(SphinxDirective):
    option_spec = {"open": directives.unchanged}

    def run(self):
        node = ledger(open=self.options.get("open", "").split())
        self.set_source_info(node)
        return [node]


def anchor(decision: Decision) -> str:
    return f"claim-{decision.id.lower()}"


def decisions_of(env, page: str) -> list[Decision]:
    """The decisions on a page of the book; none on a page that is not a notebook."""
    path = Path(env.doc2path(page))
    return decisions(path, page) if path.suffix == ".ipynb" else []


def write_ledger(app, doctree, docname):
    env = app.env

    def link(one):
        number = ".".join(map(str, env.toc_secnumbers.get(one.page, {}).get("", ())))
        title = escape(f"{number} {env.titles[one.page].astext()}".strip())
        uri = app.builder.get_relative_uri(docname, one.page)
        return f'<a href="{uri}#{anchor(one)}">{title}</a> <span class="place">{one.place}</span>'

    # After all pages are resolved, because the links need their section numbers and titles.
    for node in list(doctree.findall(ledger)):
        found = [one for page in sorted(env.found_docs) for one in decisions_of(env, page)]
        for line in problems(found, node["open"]):
            logger.warning("%s", line, location=node, type="book")
        words = {id: OPEN for id in CLAIMS}
        words |= {one.id: one.word for one in found if one.id in words}
        html = f"{tally(words)}\n{table(found, link)}\n{named_table(found, link)}"
        node.replace_self(nodes.raw("", html, format="html"))


def setup(app):
    app.add_node(ledger)
    app.add_directive("ledger", LedgerDirective)
    app.connect("doctree-resolved", write_ledger)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
