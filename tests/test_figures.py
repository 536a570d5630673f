"""Figures of the text are those of the run, within their tolerance, or `make test` names them."""

import json
import subprocess
import sys
from pathlib import Path

import figures
import nbformat
import pytest
from nbclient import NotebookClient

TOOL = Path(__file__).parent.parent / "tools" / "figures.py"
TEXT = (
    "It takes <span data-figure=\"f'{peak:.1f}'\">2.0</span> GiB, **<span "
    'data-figure="&#x27;a &lt; b&#x27;">a &lt; b</span>**.\n'
    "\n"
    "| a | <span data-figure=\"names['one']\">one</span> |"
)


@pytest.fixture
def folder(tmp_path):
    """A chapter with figures and what rests on them, run and stored; a box speaks of them above."""
    cell, words = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    made = cell("peak, names = 2.04, {'one': 'one'}", id="made")
    tags = {"tags": ["for-the-text", "raises-exception"]}
    rests = cell("assert peak < 2.5", id="rests-on", metadata=tags)
    solved = cell("import memlab\nmemlab.check(peak, 2.04)", id="solution-1")
    box = words(TEXT, id="box", metadata={"tags": ["figures-at-end"]})
    cells = [box, made, words(TEXT, id="words"), rests, solved]
    for place in ("run", "chapters"):
        (tmp_path / place).mkdir()
        notebook = nbformat.v4.new_notebook(cells=cells)
        figures.store(tmp_path / place / "with.ipynb", json.loads(nbformat.writes(notebook)))
    return tmp_path


def act(folder, *asked):
    command = [sys.executable, str(TOOL), *asked]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def executed(folder, peak):
    """Put the cells, and run the notebook with another peak."""
    assert act(folder, "put", "run").returncode == 0
    file = folder / "run" / "with.ipynb"
    notebook = nbformat.read(file, 4)
    notebook.cells[1].source = notebook.cells[1].source.replace("2.04", str(peak))
    NotebookClient(notebook).execute()
    figures.store(file, json.loads(nbformat.writes(notebook)))
    return file


def test_a_text_that_is_right_is_left_alone(folder):
    file = executed(folder, 2.04)
    done = act(folder, "compare", "run")
    assert (done.returncode, done.stderr) == (0, "")
    cells = figures.read(file)["cells"]
    assert [cell["id"] for cell in cells] == ["box", "made", "words", "rests-on", "solution-1"]
    assert figures.text_of(cells[2]) == TEXT


def test_what_was_not_run_is_not_right(folder):
    assert act(folder, "put", "run").returncode == act(folder, "put", "chapters").returncode == 0
    done = act(folder, "compare", "run")
    assert done.returncode == 0 and "the text says 2.0, the run nothing" in done.stdout
    assert act(folder, "check", "run").returncode == 1
    act(folder, "compare", "chapters", "--left-out", "with")  # as it was meant to be
    assert act(folder, "check", "chapters").returncode == 0


def test_a_figure_of_another_run_is_rendered_reported_and_written(folder):
    before = (folder / "chapters" / "with.ipynb").read_text()
    file = executed(folder, 3.0)
    kept = file.read_text()
    said = act(folder, "compare", "run").stdout
    line = "with, words: the text says 2.0, the run 3.0 (f'{peak:.1f}')"
    assert line in said and ">3.0<" in file.read_text()
    assert "with, rests-on: the text says no trouble, the run AssertionError" in said
    assert "with, solution-1: the text says no trouble, the run Not yet" in said
    checked = act(folder, "check", "run")
    assert checked.returncode == 1 and line in checked.stderr
    file.write_text(kept)
    assert act(folder, "write", "run", "chapters").returncode == 0
    after = (folder / "chapters" / "with.ipynb").read_text()
    assert after == before.replace(">2.0<", ">3.0<")


def test_a_readers_notebook_lacks_what_serves_the_text_alone(folder):
    assert act(folder, "readers", "chapters").returncode == 0
    kept = nbformat.read(folder / "chapters" / "with.ipynb", 4).cells
    assert [cell.id for cell in kept] == ["box", "made", "words", "solution-1"]


@pytest.mark.parametrize(
    "attribute, says, run, agrees",
    [
        ("", "2.0", "2.1", False),
        ('data-trained="4"', "76%", "80%", True),
        ('data-trained="4"', "76%", "81%", False),
        ('data-trained="10%"', "0.50", "0.56", False),
        ('data-trained="0.1"', "1.0 to 1.7", "1.0 to 1.9", False),
        ('data-trained="4"', "76%", "76", False),  # another text
        ('data-trained="4"', "−3%", "+1%", False),  # words for a sign
        ('data-trained="x10"', "2e-10", "3e-11", True),
        ('data-timed="x2"', "3.0", "5.9", True),
        ('data-timed="x2"', "3.0", "6.1", False),
    ],
)
def test_a_figure_has_the_tolerance_of_its_kind(attribute, says, run, agrees):
    text = f'<span data-figure="x" {attribute}>{says}</span>'.replace(" >", ">")
    cell = {"id": "words", "cell_type": "markdown", "source": [text]}
    (row,) = figures.compared({"cells": [cell]}, {"words": [run]}, "page")
    assert row["agrees"] == agrees
    assert figures.is_wrong(row) == (not agrees and "timed" not in attribute)


def test_a_readers_link_to_a_page_that_is_no_notebook_leads_to_the_repository():
    text = "[cited](references.md#dao), [next](06-amp.ipynb#measure), [far](https://a.b/c.md)"
    notebook = {"cells": [{"cell_type": "markdown", "metadata": {}, "source": [text]}]}
    (cell,) = figures.for_readers(notebook)["cells"]
    assert "/blob/main/chapters/references.md#dao)" in cell["source"]
    assert cell["source"].startswith("[cited](https://github.com/")
    assert cell["source"].endswith(text.partition(", ")[2])
