"""The ledger of claims comes from the chapters' text; a build ends where it would not be true."""

import subprocess
import sys
from collections import Counter
from html import escape
from pathlib import Path

import nbformat
import pytest

from memlab.book.claims import MARKS, NAMED, WORDS, all_claims, all_named

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "_ext"))
import ledger  # noqa: E402

OPEN = ["B26", "B27"]
DECIDED = [id for id in all_claims() if id not in OPEN]
EXPECTED = {id: WORDS[number % 4] for number, id in enumerate(DECIDED)}


def decided(id, word=None, says=None):
    """A cell that decides a statement, or says what is shown of a subject that is only named."""
    one = (all_claims() | all_named())[id]
    word = word or EXPECTED.get(id, WORDS[1] if id in OPEN else NAMED)
    figure = word if word == NAMED else f'<span data-figure="x">{MARKS.get(word, "")} {word}</span>'
    return nbformat.v4.new_markdown_cell(
        f'<details id="claim-{id.lower()}">\n<summary><b>{id}</b> “{escape(says or one["says"])}” '
        f"({escape(one['source'])}): <b>{figure}</b></summary>\n\n"
        f"counted `{id}` < 1, as [here](02-second.ipynb)\n\n</details>",
        id=f"decides-{id}",
    )


def write(path, *cells):
    title = nbformat.v4.new_markdown_cell(f"# Title of {path.stem}")
    language = {"language_info": {"name": "python", "pygments_lexer": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[title, *cells], metadata=language), path)


@pytest.fixture
def book(tmp_path):
    """A small book: statements A.. to C.. in one notebook, D.. and E.. in another."""
    cells = {id: decided(id) for id in DECIDED}
    write(tmp_path / "01-first.ipynb", *(cell for id, cell in cells.items() if id < "D"))
    rest = [cell for id, cell in cells.items() if id > "D"] + [decided(id) for id in all_named()]
    write(tmp_path / "02-second.ipynb", *rest)
    fence = f":::{{ledger}}\n:open: {' '.join(OPEN)}\n:::\n"
    (tmp_path / "claims.md").write_text(f"# Claims\n\n{fence}")
    toc = ":::{toctree}\n01-first\n02-second\nclaims\n:::\n"
    (tmp_path / "index.md").write_text(f"# Book\n\n{toc}")
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / '_ext')!r})\nnb_execution_mode = 'off'\n"
        "extensions = ['myst_nb', 'ledger']\nmyst_enable_extensions = ['colon_fence']\n"
    )
    return tmp_path


def build(book):
    """Render the small book as the real one is, warnings being errors: (status, what it says)."""
    command = [sys.executable, "-m", "sphinx", "-qEW", "--keep-going", "--no-color"]
    done = subprocess.run([*command, book, book / "html"], capture_output=True, text=True)
    return done.returncode, done.stderr


def found_in(book):
    return [
        one
        for page in ("01-first", "02-second")
        for one in ledger.decisions(book / f"{page}.ipynb", page)
    ]


def change(path, id, new):
    """Put new(cell) in the place of the cell that decides a statement."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [new(c) if c.id == f"decides-{id}" else c for c in notebook.cells]
    nbformat.write(notebook, path)


def without_verdict(cell):
    return nbformat.v4.new_markdown_cell("Nothing.", id=cell.id)


def test_the_page_has_every_statement_with_its_verdict_and_a_link_to_the_cell(book):
    assert build(book) == (0, "")
    page = (book / "html" / "claims.html").read_text(encoding="utf-8")
    assert page.count('<tr id="statement-') == len(all_claims())
    words = Counter(EXPECTED.values())
    words["open"] += len(OPEN)
    for word, mark in zip(WORDS, "✓◐✗○", strict=True):
        assert page.count(f"<b>{mark} {word.capitalize()}</b>") == words[word] > 0
    assert page.count("no chapter decides it yet") == len(OPEN) < words["open"]
    why = 'counted <code>A1</code> &lt; 1, as <a href="02-second.html">here</a>'
    assert why in page and "all five</td><td>75</td>" in page
    for id in DECIDED:
        chapter = "01-first" if id < "D" else "02-second"
        target = f"{chapter}.html#claim-{id.lower()}"
        assert f'<a href="{target}">Title of {chapter}</a>' in page
        assert f"{chapter}.ipynb, cell decides-{id}" in page
        assert f'id="claim-{id.lower()}"' in (book / "html" / f"{chapter}.html").read_text()


def test_what_is_only_named_has_a_table_and_no_verdict(book):
    assert build(book) == (0, "")
    page = (book / "html" / "claims.html").read_text(encoding="utf-8")
    table = page.partition('<table class="named">')[2].partition("</table>")[0]
    assert table.count('<tr id="named-') == len(all_named()) == 4
    for id, one in all_named().items():
        assert one["says"] in table and f"counted <code>{id}</code> &lt; 1" in table
        assert f'<a href="02-second.html#claim-{id.lower()}">' in table
        assert f'id="claim-{id.lower()}"' in (book / "html" / "02-second.html").read_text()
    change(book / "02-second.ipynb", "TensorRT", without_verdict)
    assert ledger.problems(found_in(book), OPEN) == [
        "TensorRT has no cell that shows something of it (in no cell)"
    ]


def test_a_verdict_that_is_changed_or_removed_ends_the_build(book):
    first, second = book / "01-first.ipynb", book / "02-second.ipynb"
    change(first, "A3", without_verdict)
    change(first, "B8", lambda _: decided("B8", word="holds so"))
    notebook = nbformat.read(second, as_version=4)
    notebook.cells += [decided("B4", word=WORDS[2]), decided("B26")]
    nbformat.write(notebook, second)
    change(second, "E5", lambda _: decided("E5", says="what it does not say"))
    status, said = build(book)
    lines = [line.split("WARNING: ")[1] for line in said.splitlines() if "WARNING: " in line]
    assert EXPECTED["B4"] != WORDS[2]
    assert status != 0 and lines == [
        "A3 has no verdict (in no cell)",
        f"B4 has verdicts that differ (01-first.ipynb, cell decides-B4: {EXPECTED['B4']}; "
        "02-second.ipynb, cell decides-B4: does not hold)",
        "B8 has a verdict of another word (01-first.ipynb, cell decides-B8: holds so)",
        "B26 is listed as open and is decided "
        "(02-second.ipynb, cell decides-B26: holds with a condition)",
        "E5 is cited in other words than those of claims.json "
        f"(02-second.ipynb, cell decides-E5: {EXPECTED['E5']})",
    ]


def test_verdicts_that_agree_are_no_problem(book):
    assert ledger.problems(found_in(book) * 2, OPEN) == []


def test_what_is_listed_as_open_is_a_statement(book):
    wanted = ["Z1 is listed as open and is no statement"]
    assert ledger.problems(found_in(book), [*OPEN, "Z1"]) == wanted


def test_what_is_decided_is_a_statement(book):
    cell = decided("A1")
    cell.source = cell.source.replace("<b>A1</b>", "<b>Z1</b>")
    change(book / "01-first.ipynb", "A1", lambda _: cell)
    assert ledger.problems(found_in(book), OPEN) == [
        "Z1 is no statement (01-first.ipynb, cell decides-A1)",
        "A1 has no verdict (in no cell)",
    ]
