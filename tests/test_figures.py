"""Figures of the text are those of the run, or the build ends with their names."""

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
    assert done.returncode == 1 and "the text says 2.0, the run nothing" in done.stderr


def test_a_figure_of_another_run_ends_the_build_and_is_written(folder):
    before = {f.name: f.read_text() for f in (folder / "chapters").iterdir()}
    executed(folder, 3.0)
    kept = {f.name: f.read_text() for f in (folder / "run").iterdir()}
    done = act(folder, "compare", "run")
    assert done.returncode == 1
    assert "with, words: the text says 2.0, the run 3.0 (f'{peak:.1f}')" in done.stderr
    for name, text in kept.items():
        (folder / "run" / name).write_text(text)
    assert act(folder, "write", "run", "chapters").returncode == 0
    after = {f.name: f.read_text() for f in (folder / "chapters").iterdir()}
    assert after["without.ipynb"] == before["without.ipynb"]
    assert after["with.ipynb"] == before["with.ipynb"].replace(">2.0<", ">3.0<")


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
