"""Run a chapter as a reader would who has changed a word of it.

    python tools/try_edit.py 05-freezing deberta-runs "batch_size=16" "batch_size=8"

The notebook is the one that Colab opens, without the cells that only serve the text. All its cells
run, and each that fails is listed with the last line of its error; status 1 if one does.
"""

import argparse
import json
import sys
from pathlib import Path

import figures
import nbformat
from nbclient import NotebookClient

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
SECONDS = 300  # for a cell


def edited(chapter: str, cell: str, old: str, new: str) -> nbformat.NotebookNode:
    """A reader's notebook with one cell changed.

    Raises ValueError for a cell that is not there, and where it does not hold `old` once.
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
    """A line for each cell that ends with an error; the others run all the same."""
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
