"""Sphinx extension: citations that are readable text wherever a chapter is opened.

A role such as `cite` shows as raw text on Colab, Kaggle and in JupyterLab. Notebooks therefore
contain a link, `[[Dettmers et al., 2023]](references.md#dettmers2023qlora)`. The keys of several
works are separated by commas. The link becomes the role when Sphinx reads a page. The build warns
if the text in the brackets is not the works' authors and years.
"""

import re
from functools import cache
from pathlib import Path

from pybtex.database import parse_file
from pybtex.richtext import Text
from sphinx.util import logging

LINK = re.compile(r"\[\[([^\]]+)\]\]\(references\.md#([^)]+)\)")
BIBLIOGRAPHY = Path(__file__).resolve().parent.parent / "references.bib"
logger = logging.getLogger(__name__)


@cache
def works():
    return parse_file(str(BIBLIOGRAPHY)).entries


def named(keys: str) -> str:
    """Authors and years of the works with these keys, as `bibtex_reference_style` prints them.

    keys: keys of references.bib, separated by commas. Raises KeyError for an unknown key.
    """
    return "; ".join(map(_named, keys.split(",")))


def _named(key):
    entry = works()[key]
    people = [" ".join(person.last_names) for person in entry.persons["author"]]
    last = [str(Text.from_latex(name)) for name in people]
    authors = f"{last[0]} et al." if len(last) > 2 else " and ".join(last)
    return f"{authors}, {entry.fields.get('year', 'n.d.')}"


def links_become_citations(app, docname, source):
    def citation(link):
        text, keys = link.groups()
        try:
            wanted = named(keys)
        except KeyError as error:
            wanted = f"nothing: references.bib has no {error}"
        if text != wanted:
            logger.warning("a link says %r where the work is %s", text, wanted, location=docname)
        return f"{{cite}}`{keys}`"

    source[0] = LINK.sub(citation, source[0])


def setup(app):
    app.connect("source-read", links_become_citations)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
