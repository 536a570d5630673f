"""The first use of a glossary term on a page is a link, and nothing else on the page changes."""

import re
import subprocess
import sys

import pytest
from contents import ROOT

GLOSSARY = """\
# Glossary

```{glossary}
activations
  What is kept. In bytes. [](page.md)

peak allocated
  The highest level: of tensors. [](page.md)

checkpointing
gradient checkpointing
  Keeping few. [](page.md)

block (allocator)
  A piece. [](page.md), [](third.md)

fp16
  A format. [](page.md)
```
"""
PAGE = """\
# Activations in a heading

`activation` and [an activation](other.md) are no prose, nor is

```python
activations = fp16
```

| activations |
|---|
| fp16 |

But **Activations** are, and every activation after it is not. Gradient
checkpointing, checkpointing; the *peak
allocated*; blocks; `fp16-amp`, fp16-amp and non-fp16 before fp16: an end.
"""


@pytest.fixture(scope="module")
def links(tmp_path_factory):
    """page -> [(text, anchor, title)] of the links that a build made."""
    book = tmp_path_factory.mktemp("book")
    (book / "chapters").mkdir()
    (book / "chapters" / "glossary.md").write_text(GLOSSARY)
    for name, text in {
        "page": PAGE,
        "other": "# Other\n\nBlocks of activations.\n",
        "third": "# Third\n\nA block.\n",
    }.items():
        (book / "chapters" / f"{name}.md").write_text(text)
    toc = ":::{toctree}\nchapters/glossary\nchapters/page\nchapters/other\nchapters/third\n:::\n"
    (book / "index.md").write_text(f"# Book\n\nActivations.\n\n{toc}")
    (book / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / '_ext')!r})\n"
        "extensions = ['myst_parser', 'term_links']\nmyst_enable_extensions = ['colon_fence']\n"
    )
    command = [sys.executable, "-m", "sphinx", "-qEW", book, book / "html"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    form = re.compile(
        r'<a class="glossary-term[^"]*" href="([^"#]*)#([^"]*)" title="([^"]*)">([^<]*)'
    )
    found = {}
    for page in ("index", "chapters/page", "chapters/other", "chapters/third", "chapters/glossary"):
        html = (book / "html" / f"{page}.html").read_text()
        found[page] = [
            (" ".join(text.split()), anchor, title)
            for uri, anchor, title, text in form.findall(html)
        ]
        targets = {uri for uri, *_ in form.findall(html)}
        assert targets <= {"glossary.html"} and html.count("glossary-term") == len(found[page])
    return found


def test_the_first_use_in_prose_is_linked(links):
    assert links["chapters/page"] == [
        ("Activations", "term-activations", "What is kept"),
        ("Gradient checkpointing", "term-checkpointing", "Keeping few"),
        ("peak allocated", "term-peak-allocated", "The highest level"),
        ("blocks", "term-block-allocator", "A piece"),
        ("fp16", "term-fp16", "A format"),
    ]


def test_a_word_of_several_senses_is_linked_where_its_entry_says(links):
    assert [text for text, *_ in links["chapters/other"]] == ["activations"]
    assert [text for text, *_ in links["chapters/third"]] == ["block"]


def test_the_first_page_and_the_glossary_have_no_such_links(links):
    assert links["index"] == links["chapters/glossary"] == []
