"""Run a chapter with one edit, as a reader might make it.

    python tools/try_edit.py 05-freezing deberta-runs "batch_size=16" "batch_size=8"

The arguments are the chapter, the cell's id, the old text and the new text. The notebook is the one
that Colab opens, without the cells that only serve the text. All its cells run. Each failed cell is
listed with the first line of its error, and the exit status is then 1.
"""

import argparse
import json
import sys
from pathlib import Path

import figures
import nbformat
from nbclient import NotebookClient

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
SECONDS = 300  # time limit of a cell


def edited(chapter: str, cell: str, old: str, new: str) -> nbformat.NotebookNode:
    """The reader's notebook of a chapter with one cell changed.

    Raises ValueError if there is no such cell, or if it does not contain `old` exactly once.
    """
    stored = figures.for_readers(figures.read(CHAPTERS / f"{chapter}.ipynb"))
    notebook = nbformat.reads(json.dumps(stored), as_version=4)
    sources = {one.id: one for one in notebook.cells if one.cell_type == "code"}
    if cell not in sources:
        raise ValueError(f"{chapter} has no code cell {cell!r}: allowed are {', '.join(sources)}")
    times = sources[cell].source.count(old)
    if times != 1:
        raise ValueError(f"{chapter}, {cell}: {old!r} is there {times} times, wanted is once")
    sources[cell].source = sources[cell].source.replace(old, new)
    return notebook


def failures(notebook: nbformat.NotebookNode) -> list[str]:
    """One line per cell that ends with an error; the cells after it run all the same."""
    client = NotebookClient(notebook, timeout=SECONDS, allow_errors=True, kernel_name="python3")
    client.execute(cwd=str(CHAPTERS))
    lines = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                says = f"{output.ename}: {output.evalue}".splitlines()[0]
                lines.append(f"{cell.id}: {says[:300]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("chapter", "cell", "old", "new"):
        parser.add_argument(name)
    asked = parser.parse_args()
    found = failures(edited(**vars(asked)))
    print(*found, f"{len(found)} cells failed", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
