"""Figures of the text are those of the run, within their tolerance, or `make test` names them."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TOOL = Path(__file__).parent.parent / "tools" / "figures.py"
FIGURES = runpy.run_path(str(TOOL))
TEXT = (
    "It takes <span data-figure=\"f'{peak:.1f}'\">2.0</span> GiB, **<span "
    'data-figure="&#x27;a &lt; b&#x27;">a &lt; b</span>**.\n'
    "\n"
    "| a | <span data-figure=\"names['one']\">one</span> |"
)


@pytest.fixture
def folder(tmp_path):
    """A chapter with figures, one without, and a second folder with both."""
    cells = [
        nbformat.v4.new_code_cell("peak, names = 2.04, {'one': 'one'}", id="made"),
        nbformat.v4.new_markdown_cell(TEXT, id="words"),
    ]
    for place in ("run", "chapters"):
        (tmp_path / place).mkdir()
        for name, kept in (("with", cells), ("without", cells[:1])):
            notebook = nbformat.v4.new_notebook(cells=kept)
            store(tmp_path / place / f"{name}.ipynb", notebook)
    return tmp_path


def store(file, notebook):
    FIGURES["store"](file, json.loads(nbformat.writes(notebook)))


def act(folder, *asked):
    command = [sys.executable, str(TOOL), *asked]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def executed(folder, peak):
    """Put the cells, and run the notebooks with another peak."""
    assert act(folder, "put", "run").returncode == 0
    for file in (folder / "run").glob("*.ipynb"):
        notebook = nbformat.read(file, 4)
        notebook.cells[0].source = notebook.cells[0].source.replace("2.04", str(peak))
        NotebookClient(notebook).execute()
        store(file, notebook)


def test_a_text_that_is_right_is_left_alone(folder):
    executed(folder, 2.04)
    done = act(folder, "compare", "run")
    assert done.returncode == 0 and done.stderr == ""
    cells = FIGURES["read"](folder / "run" / "with.ipynb")["cells"]
    assert [cell["id"] for cell in cells] == ["made", "words"]
    assert FIGURES["text_of"](cells[1]) == TEXT


def test_what_was_not_run_is_not_right(folder):
    assert act(folder, "put", "run").returncode == 0
    done = act(folder, "compare", "run")
    assert done.returncode == 0 and "the text says 2.0, the run nothing" in done.stdout
    assert act(folder, "check", "run").returncode == 1
    assert act(folder, "put", "chapters").returncode == 0
    done = act(folder, "compare", "chapters", "--left-out", "with")  # as it was meant to be
    assert done.returncode == 0 and act(folder, "check", "chapters").returncode == 0


def test_a_figure_of_another_run_is_rendered_reported_and_written(folder):
    before = {f.name: f.read_text() for f in (folder / "chapters").iterdir()}
    executed(folder, 3.0)
    kept = {f.name: f.read_text() for f in (folder / "run").iterdir()}
    done = act(folder, "compare", "run")
    line = "with, words: the text says 2.0, the run 3.0 (f'{peak:.1f}')"
    assert done.returncode == 0 and line in done.stdout and "3 exact (1 differ)" in done.stdout
    assert ">3.0<" in (folder / "run" / "with.ipynb").read_text()
    checked = act(folder, "check", "run")
    assert checked.returncode == 1 and line in checked.stderr
    for name, text in kept.items():
        (folder / "run" / name).write_text(text)
    assert act(folder, "write", "run", "chapters").returncode == 0
    after = {f.name: f.read_text() for f in (folder / "chapters").iterdir()}
    assert after["without.ipynb"] == before["without.ipynb"]
    assert after["with.ipynb"] == before["with.ipynb"].replace(">2.0<", ">3.0<")


@pytest.mark.parametrize(
    "attribute, says, run, agrees",
    [
        ("", "2.0", "2.1", False),
        ('data-trained="4"', "76%", "80%", True),
        ('data-trained="4"', "76%", "81%", False),
        ('data-trained="10%"', "0.50", "0.55", True),
        ('data-trained="10%"', "0.50", "0.56", False),
        ('data-trained="0.1"', "1.0 to 1.7", "1.1 to 1.6", True),
        ('data-trained="0.1"', "1.0 to 1.7", "1.0 to 1.9", False),
        ('data-trained="4"', "76%", "76", False),  # another text
        ('data-trained="4"', "−3%", "+1%", False),  # words for a sign
        ('data-trained="4"', "76%", "ZeroDivisionError: division by zero", False),
        ('data-trained="x10"', "2e-10", "3e-11", True),
        ('data-timed="x2"', "3.0", "5.9", True),
        ('data-timed="x2"', "3.0", "6.1", False),
    ],
)
def test_a_figure_has_the_tolerance_of_its_kind(attribute, says, run, agrees):
    text = f'<span data-figure="x" {attribute}>{says}</span>'.replace(" >", ">")
    cell = {"id": "words", "cell_type": "markdown", "source": [text]}
    notebook = {"cells": [cell]}
    (row,) = FIGURES["compared"](notebook, {"words": [run]}, "page")
    assert row["agrees"] == agrees
    assert FIGURES["is_wrong"](row) == (not agrees and "timed" not in attribute)


def test_a_readers_link_to_a_page_that_is_no_notebook_leads_to_the_repository():
    text = "[cited](references.md#dao), [next](06-amp.ipynb#measure), [far](https://a.b/c.md)"
    notebook = {"cells": [{"cell_type": "markdown", "metadata": {}, "source": [text]}]}
    (cell,) = FIGURES["for_readers"](notebook)["cells"]
    assert "/blob/main/chapters/references.md#dao)" in cell["source"]
    assert cell["source"].startswith("[cited](https://github.com/")
    assert cell["source"].endswith(text.partition(", ")[2])


def test_what_serves_the_text_alone_stops_neither_reader_nor_build(folder):
    file = folder / "run" / "with.ipynb"
    notebook = nbformat.read(file, 4)
    serves = nbformat.v4.new_code_cell("assert peak < 2.5", id="rests-on")
    serves.metadata["tags"] = ["for-the-text", "raises-exception"]
    solved = nbformat.v4.new_code_cell("import memlab\nmemlab.check(3, 4)", id="solution-1")
    notebook.cells += [serves, solved]
    store(file, notebook)
    (folder / "readers").mkdir()
    (folder / "readers" / "with.ipynb").write_text(file.read_text())
    assert act(folder, "readers", "readers").returncode == 0
    kept = nbformat.read(folder / "readers" / "with.ipynb", 4).cells
    assert [cell.id for cell in kept] == ["made", "words", "solution-1"]
    executed(folder, 3.0)
    said = act(folder, "compare", "run").stdout
    assert "with, rests-on: the text says no trouble, the run AssertionError" in said
    assert "with, solution-1: the text says no trouble, the run Not yet" in said
    assert act(folder, "check", "run").returncode == 1


def test_runs_under_other_circumstances_are_set_beside_each_other(folder):
    stored = (folder / "run" / "with.ipynb").read_text()
    for name, peak in (("one", 2.04), ("two", 3.0)):
        (folder / "run" / "with.ipynb").write_text(stored)
        executed(folder, peak)
        (folder / name / "chapters").mkdir(parents=True)
        for file in (folder / "run").iterdir():
            (folder / name / "chapters" / file.name).write_text(file.read_text())
        act(folder, "compare", f"{name}/chapters")
    said = act(folder, "spread", "one/chapters", "two/chapters").stdout
    assert said.strip() == ("with, words: 2.0 [exact, out of bounds] 2.0 | 3.0  (f'{peak:.1f}')")


def test_another_seed_moves_what_is_drawn(folder):
    file = folder / "run" / "without.ipynb"
    notebook = nbformat.read(file, 4)
    notebook.cells[0].source = "import torch\ntorch.manual_seed(3)\nprint(torch.initial_seed())"
    store(file, notebook)
    assert act(folder, "put", "run", "--seed", "4").returncode == 0
    notebook = nbformat.read(file, 4)
    NotebookClient(notebook).execute()
    assert [output.text for output in notebook.cells[-1].outputs] == ["7\n"]


def test_a_box_at_the_top_may_speak_of_what_the_page_makes(folder):
    file = folder / "run" / "with.ipynb"
    notebook = nbformat.read(file, 4)
    made, words = notebook.cells
    words.metadata["tags"] = ["figures-at-end"]
    notebook.cells = [words, made]
    store(file, notebook)
    executed(folder, 2.04)
    assert act(folder, "compare", "run").returncode == 0
    assert [cell.id for cell in nbformat.read(file, 4).cells] == ["words", "made"]
