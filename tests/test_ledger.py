"""The ledger of claims comes from executed notebooks; a build ends where it would not be true."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell

from memlab.book.claims import WORDS, all_claims, all_named, named, verdict

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "_ext"))
import ledger  # noqa: E402

OPEN = ["B26", "B27"]
DECIDED = [id for id in all_claims() if id not in OPEN]


def decided(id, **changed):
    """A cell as a run leaves it that decided a statement, as is expected unless `changed`."""
    if id in all_named():
        shown, call = named(id, f"shown `{id}` < 1"), "named"
    else:
        word = all_claims()[id]["word"]
        holds = None if word == "open" else word != WORDS[2]
        expected = {"holds": holds, "condition": word == WORDS[1]}
        arguments = {"because": f"counted `{id}` < 1"} | expected | changed
        shown, call = verdict(id, **arguments), "verdict"
    data, metadata = InteractiveShell.instance().display_formatter.format(shown)
    output = nbformat.v4.new_output("execute_result", data, metadata=metadata, execution_count=1)
    source = f'{call}(\n    "{id}",\n    because=found,\n)'
    return nbformat.v4.new_code_cell(source, outputs=[output], id=f"decides-{id}")


def write(path, *cells):
    title = nbformat.v4.new_markdown_cell(f"# Title of {path.stem}")
    language = {"language_info": {"name": "python", "pygments_lexer": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[title, *cells], metadata=language), path)


@pytest.fixture
def book(tmp_path):
    """A small book: statements A.. to C.. in one executed notebook, D.. and E.. in another."""
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


def without_output(cell):
    return nbformat.from_dict(cell | {"outputs": []})


def test_the_page_has_every_statement_with_its_verdict_and_a_link_to_the_cell(book):
    assert build(book) == (0, "")
    page = (book / "html" / "claims.html").read_text(encoding="utf-8")
    assert page.count('<tr id="statement-') == len(all_claims())
    words = Counter(all_claims()[id]["word"] for id in DECIDED)
    words["open"] += len(OPEN)
    for word, mark in zip(WORDS, "✓◐✗○", strict=True):
        assert page.count(f"<b>{mark} {word.capitalize()}</b>") == words[word] > 0
    assert page.count("no chapter decides it yet") == len(OPEN) < words["open"]
    assert "counted <code>A1</code> &lt; 1" in page and "all five</td><td>75</td>" in page
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
        assert one["says"] in table and f"shown <code>{id}</code> &lt; 1" in table
        assert f'<a href="02-second.html#claim-{id.lower()}">' in table
        assert f'id="claim-{id.lower()}"' in (book / "html" / "02-second.html").read_text()
    change(book / "02-second.ipynb", "TensorRT", without_output)
    assert ledger.problems(found_in(book), OPEN) == [
        "TensorRT has no cell that shows something of it "
        "(02-second.ipynb, cell decides-TensorRT: nothing)"
    ]


def test_a_verdict_that_is_changed_or_removed_ends_the_build(book):
    first, second = book / "01-first.ipynb", book / "02-second.ipynb"
    change(first, "A3", without_output)
    notebook = nbformat.read(second, as_version=4)
    notebook.cells += [decided("B4", holds=False), decided("B26")]
    nbformat.write(notebook, second)
    change(second, "E5", lambda cell: nbformat.v4.new_code_cell("1", id="other"))
    status, said = build(book)
    lines = [line.split("WARNING: ")[1] for line in said.splitlines() if "WARNING: " in line]
    assert status != 0 and lines == [
        "A3 has no verdict (01-first.ipynb, cell decides-A3: nothing)",
        "B4 has verdicts that differ (01-first.ipynb, cell decides-B4: holds with a condition; "
        "02-second.ipynb, cell decides-B4: does not hold)",
        "B26 is listed as open and is decided "
        "(02-second.ipynb, cell decides-B26: holds with a condition)",
        "E5 has no verdict (in no cell)",
    ]


def test_a_verdict_that_is_not_the_expected_one_ends_the_build(book):
    change(book / "01-first.ipynb", "B8", lambda _: decided("B8", holds=False))
    change(book / "02-second.ipynb", "E18", lambda _: decided("E18", condition=False))
    status, said = build(book)
    lines = [line.split("WARNING: ")[1] for line in said.splitlines() if "WARNING: " in line]
    assert status != 0 and lines == [
        "B8 is expected to be 'holds' and is 'does not hold' "
        "(01-first.ipynb, cell decides-B8: does not hold)",
        "E18 is expected to be 'holds with a condition' and is 'holds' "
        "(02-second.ipynb, cell decides-E18: holds)",
    ]


@pytest.mark.parametrize("has_gpu, others", [(False, ["B10", "D3"]), (True, [])])
def test_a_verdict_that_rests_on_a_clock_may_be_another(book, has_gpu, others, monkeypatch):
    for id in ("A11", "B10", "B28", "B29", "D3", "E2"):
        path = book / ("01-first.ipynb" if id < "D" else "02-second.ipynb")
        change(path, id, lambda _, id=id: decided(id, holds=False))
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert [line.split()[0] for line in ledger.problems(found_in(book), OPEN)] == others


def test_verdicts_that_agree_are_no_problem(book):
    assert ledger.problems(found_in(book) * 2, OPEN) == []


def test_what_is_listed_as_open_is_a_statement(book):
    wanted = ["Z1 is listed as open and is no statement"]
    assert ledger.problems(found_in(book), [*OPEN, "Z1"]) == wanted


def test_a_changed_word_in_the_file_is_seen(book):
    path = book / "01-first.ipynb"
    notebook = json.loads(path.read_text())
    output = notebook["cells"][1]["outputs"][0]
    output["metadata"]["text/markdown"]["verdict"]["word"] = "does not hold"
    path.write_text(json.dumps(notebook))
    words = ["does not hold", all_claims()["A2"]["word"]]
    assert [one.word for one in found_in(book)[:2]] == words
