"""Sphinx extension: link the first use of each glossary term on a page to its entry.

A Sphinx role in the Markdown would show as raw text on Colab, Kaggle and in JupyterLab. The links
are therefore added when a page is rendered, and the source needs no markup. Only prose gets links,
not code, outputs, headings, tables, captions, formulas or other links.

A term with an addition in brackets, such as "block (allocator)", has other meanings elsewhere. It
is linked only on the pages that its entry names.
"""

import re
from dataclasses import dataclass
from itertools import groupby

from docutils import nodes
from sphinx import addnodes

GLOSSARY = "chapters/glossary"
NO_PROSE = (
    nodes.reference,
    nodes.literal,
    nodes.FixedTextElement,  # code
    nodes.math,
    nodes.raw,
    nodes.title,
    nodes.rubric,
    nodes.table,
    nodes.caption,
    nodes.container,  # cells with their outputs, folded boxes
    nodes.citation,
)


@dataclass(frozen=True)
class Term:
    """An entry of the glossary.

    words: the terms of the entry, without additions in brackets.
    anchor: the id of the entry on the glossary's page.
    meaning: the first sentence of the definition, shown as a tooltip.
    pages: the pages that the entry links to.
    everywhere: whether the terms are linked on all pages, not only on `pages`.
    """

    words: tuple[str, ...]
    anchor: str
    meaning: str
    pages: frozenset[str]
    everywhere: bool


def terms_of(glossary: nodes.document) -> list[Term]:
    """The entries of the glossary's page, read from its doctree."""
    found = []
    for item in glossary.findall(nodes.definition_list_item):
        *heads, definition = item
        words = [head.astext() for head in heads]
        said = " ".join(definition.astext().split())
        names = [link["reftarget"] for link in definition.findall(addnodes.pending_xref)]
        term = Term(
            words=tuple(word.partition(" (")[0] for word in words),
            anchor=heads[0]["ids"][0],
            meaning=re.split(r"[.;:](?: |$)", said)[0],
            pages=frozenset(names),
            everywhere=not any(" (" in word for word in words),
        )
        found.append(term)
    return found


def form(word: str) -> str:
    """A regular expression for a term: singular or plural, capitalised or not."""
    first, *rest = word.removesuffix("s").split()
    begin = f"[{first[0]}{first[0].upper()}]" if word[0].islower() else re.escape(first[0])
    return begin + r"\s+".join(map(re.escape, [first[1:], *rest])) + "(?:e?s)?"


def pattern(terms: list[Term]) -> re.Pattern:
    """A regular expression that finds the longest term at each place.

    The name of the matching group, `t<i>_<n>`, says that the i-th term matched.
    """
    words = [(word, i) for i, term in enumerate(terms) for word in term.words]
    words.sort(key=lambda pair: -len(pair[0]))
    found = "|".join(f"(?P<t{i}_{n}>{form(word)})" for n, (word, i) in enumerate(words))
    return re.compile(rf"(?<![\w/.-])(?:{found})(?![\w/-])")


def join_lines(doctree: nodes.document) -> None:
    """Join the lines of each paragraph, so that a term may continue on the next line."""
    for above in list(doctree.findall(nodes.TextElement)):
        joined = []
        for is_text, run in groupby(above, lambda child: isinstance(child, nodes.Text)):
            children = list(run)
            joined += [nodes.Text("".join(children))] if is_text else children
        above[:] = joined


def is_prose(text: nodes.Text) -> bool:
    node = text.parent
    while node is not None and not isinstance(node, NO_PROSE):
        node = node.parent
    return node is None


def link_terms(doctree: nodes.document, terms: list[Term], uri: str) -> None:
    """Turn the first use of each term in a page's prose into a link to its entry at `uri`."""
    left = list(terms)
    join_lines(doctree)
    for text in list(doctree.findall(nodes.Text)):
        if not left or not is_prose(text):
            continue
        rest, parts = text.astext(), []
        # Split the text node at each match; a linked term leaves the search.
        while left and (match := pattern(left).search(rest)):
            term = left.pop(int(match.lastgroup[1:].split("_")[0]))
            link = nodes.reference("", match[0], refuri=f"{uri}#{term.anchor}", internal=True)
            link["classes"].append("glossary-term")
            link["reftitle"] = term.meaning
            parts += [nodes.Text(rest[: match.start()]), link]
            rest = rest[match.end() :]
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(rest)])


def link_page(app, doctree, docname):
    alone = GLOSSARY not in app.env.found_docs  # a test renders single pages without the book
    if alone or docname in (GLOSSARY, app.config.root_doc):
        return
    terms = terms_of(app.env.get_doctree(GLOSSARY))
    here = [term for term in terms if term.everywhere or docname in term.pages]
    link_terms(doctree, here, app.builder.get_relative_uri(docname, GLOSSARY))


def setup(app):
    app.connect("doctree-resolved", link_page)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
