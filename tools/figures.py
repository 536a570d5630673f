"""Figures in the text of chapters: each stands beside the expression that gives it.

    <span data-figure="f'{best.needed / GiB:.1f}'">22.1</span>

    python tools/figures.py put FOLDER        a cell after each text, which evaluates its figures
    python tools/figures.py compare FOLDER    takes these cells out of the executed notebooks, and
                                              ends with each figure that the text has otherwise
    python tools/figures.py write FOLDER TO   the same, and writes what the runs gave into the
                                              notebooks of the same names in another folder

An expression sees what the page's code has made above it; in a text with the tag `figures-at-end`,
as the box at the top of a page is one, what the whole page has made. `make book` compares,
`make figures` writes. A verdict that rests on a clock is not compared, for it may be another on
another machine.
"""

import argparse
import html
import json
import re
import sys
from pathlib import Path

from memlab.book.claims import rests_on_a_clock

FIGURE = re.compile(r'<span data-figure="([^"]*)">([^<]*)</span>')
MIME = "application/vnd.memlab.figures+json"
TAG = "figures"
AT_END = "figures-at-end"  # a tag of texts
SUFFIX = "-figures"  # of a cell that evaluates, after the id of its text
VERDICT = re.compile(r"verdict\('(\w+)'")


def figures_of(cell: dict) -> list[tuple[str, str]]:
    """(expression, what the text says) of each figure of a cell."""
    found = FIGURE.findall(text_of(cell)) if cell["cell_type"] == "markdown" else []
    return [(html.unescape(expression), html.unescape(said)) for expression, said in found]


def text_of(cell: dict) -> str:
    """The source of a cell."""
    return "".join(cell["source"])


def with_figures(notebook: dict) -> dict:
    """The notebook with a cell for each text that has figures, after it or at the end."""
    cells, last = [], []
    for cell in notebook["cells"]:
        cells.append(cell)
        expressions = [expression for expression, _ in figures_of(cell)]
        if expressions:
            listed = "".join(f"    str({one}),\n" for one in expressions)
            needs = "from memlab.book import verdict\n" if "verdict(" in listed else ""
            place = last if AT_END in cell["metadata"].get("tags", ()) else cells
            place.append(
                {
                    "cell_type": "code",
                    "execution_count": None,
                    "id": cell["id"] + SUFFIX,
                    "metadata": {"tags": [TAG, "remove-cell"]},
                    "outputs": [],
                    "source": needs
                    + f'get_ipython().display_pub.publish({{"{MIME}": [\n{listed}]}})',
                }
            )
    return notebook | {"cells": cells + last}


def without_figures(notebook: dict) -> tuple[dict, dict[str, list[str]]]:
    """The notebook without those cells, and cell -> what its figures were in the run."""
    cells, found = [], {}
    for cell in notebook["cells"]:
        if TAG in cell["metadata"].get("tags", ()):
            data = [one["data"] for one in cell["outputs"] if "data" in one]
            text = cell["id"].removesuffix(SUFFIX)
            found[text] = next((one[MIME] for one in data if MIME in one), [])
        else:
            cells.append(cell)
    return notebook | {"cells": cells}, found


def written(notebook: dict, found: dict[str, list[str]]) -> dict:
    """The notebook whose texts say what the run gave."""
    cells = []
    for cell in notebook["cells"]:
        values = iter(found.get(cell["id"], ()))

        def as_run(match, values=values):
            return f'<span data-figure="{match[1]}">{html.escape(next(values), quote=False)}</span>'

        if cell["id"] in found:
            text = FIGURE.sub(as_run, text_of(cell))
            cell = cell | {"source": text.splitlines(keepends=True)}
        cells.append(cell)
    return notebook | {"cells": cells}


def differences(notebook: dict, found: dict[str, list[str]]) -> list[str]:
    """A line for each figure that the run gave otherwise, or not at all."""
    lines = []
    for cell in notebook["cells"]:
        figures = figures_of(cell)
        values = found.get(cell["id"]) or ["nothing"] * len(figures)
        for (expression, said), value in zip(figures, values, strict=True):
            claim = VERDICT.match(expression)
            if said != value and not (claim and rests_on_a_clock(claim[1])):
                lines.append(f"{cell['id']}: the text says {said}, the run {value} ({expression})")
    return lines


def read(file: Path) -> dict:
    """The notebook in a file."""
    return json.loads(file.read_text(encoding="utf-8"))


def store(file: Path, notebook: dict) -> None:
    """Write a notebook as Jupyter does."""
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("act", choices=("put", "compare", "write"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("to", type=Path, nargs="?")
    asked = parser.parse_args()
    wrong = []
    for file in sorted(asked.folder.glob("*.ipynb")):
        notebook = read(file)
        if asked.act == "put":
            store(file, with_figures(notebook))
            continue
        notebook, found = without_figures(notebook)
        lines = differences(notebook, found)
        if asked.act == "write" and lines:
            notebook = written(notebook, found)
            store(asked.to / file.name, written(read(asked.to / file.name), found))
            print(*(f"{file.stem}, {line}" for line in lines), sep="\n")
        elif lines:
            wrong += [f"{file.stem}, {line}" for line in lines]
        store(file, notebook)
    if wrong:
        sys.exit("\n".join([*wrong, "Figures of the text are others in the run: make figures"]))


if __name__ == "__main__":
    main()
