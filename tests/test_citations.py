"""Citations are text in a notebook, and a link to the work on the page."""

import json
import logging

import citations
import pytest
from contents import ROOT


def read(text, caplog):
    """(what Sphinx reads in place of a text, what is warned of)."""
    logging.getLogger("sphinx").propagate = True
    source = [text]
    with caplog.at_level(logging.WARNING, "sphinx"):
        citations.links_become_citations(None, "page", source)
    return source[0], [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "key, named",
    [
        ("hf2022efficient", "Hugging Face, 2022"),  # one name of two words
        ("shazeer2018adafactor", "Shazeer and Stern, 2018"),
        ("dettmers2023qlora", "Dettmers et al., 2023"),
        ("torchao", "PyTorch, n.d."),  # a page without a date
        ("ml_dtypes", "The ml_dtypes contributors, 2026"),  # written in TeX
        ("kudo2018sentencepiece,kudo2018subword", "Kudo and Richardson, 2018; Kudo, 2018"),
    ],
)
def test_a_link_with_the_works_name_is_read_as_a_citation(key, named, caplog):
    said, warned = read(f"As [[{named}]](references.md#{key}) say.", caplog)
    assert said == f"As {{cite}}`{key}` say." and warned == []


@pytest.mark.parametrize(
    "key, warning",
    [
        ("torchao", "a link says 'Adam, 1999' where the work is PyTorch, n.d."),
        ("nobody", "references.bib has no 'nobody'"),
    ],
)
def test_another_name_and_an_unknown_key_are_warned_of(key, warning, caplog):
    _, warned = read(f"[[Adam, 1999]](references.md#{key})", caplog)
    assert len(warned) == 1 and warning in warned[0]


@pytest.mark.parametrize("path", sorted((ROOT / "chapters").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_shows_no_role(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert "{cite}" not in text
    assert text.count("references.md#") == len(citations.LINK.findall(text))
