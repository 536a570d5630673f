"""Keep the figures in the text of chapters equal to what the code computes.

Each figure is written next to the expression that gives it:

    <span data-figure="f'{best.needed / GiB:.1f}'">22.1</span>                exact
    <span data-figure="percent(accuracy)" data-trained="4">76%</span>         trained: 76 ± 4
    <span data-figure="f'{slow / fast:.1f}'" data-timed="x2">3.1</span>       timed: a factor of 2

    python tools/figures.py put FOLDER        add a cell after each text that evaluates its figures
    python tools/figures.py compare FOLDER    remove these cells from the executed notebooks, write
                                              the run's figures into the texts, list differences
    python tools/figures.py check FOLDER      exit with status 1 if `compare` found a wrong figure
    python tools/figures.py write FOLDER TO   like `compare`, and correct the wrong figures in the
                                              notebooks of the same names in the folder TO
    python tools/figures.py readers FOLDER    remove the cells that only serve the text

An expression sees the variables of the page's code above it. In a text with the tag
`figures-at-end`, such as the box at the top of a page, it sees those of the whole page.

Code cells with the tag `for-the-text` compute values that only the text uses, and assert what the
text relies on. They run in the build but are not in the notebooks that readers open
(`for_readers`), so no edit of a reader can make them fail. An error in such a cell does not end the
build. It is reported as a wrong figure, and so is a solution that its own `check` rejects.

There are three kinds of figures. Bytes and counts are exact: they are the same on every processor.
Results of a training have a tolerance: 4 (in the unit of the text), 10% (of the value) or x2 (a
factor). It comes from runs with other seeds and instruction sets (`make portable-avx2`,
`make portable-oldest`). So has what is counted in the docstrings of installed packages, which are
not the same for every Python: NumPy leaves some modules out for 3.12 and later. Measured times are
never wrong, only reported; so is a verdict that rests on a measured time. `make book` renders the
figures of the run; `make test` checks them.
"""

import argparse
import html
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import yaml

from memlab.book.claims import rests_on_a_clock

FIGURE = re.compile(
    r'<span data-figure="([^"]*)"(?:\s+data-(trained|timed)="([^"]*)")?>([^<]*)</span>'
)
PAGE = re.compile(r"\]\(([\w-]+\.md)\b")  # a link to a page that is not a notebook
ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
MIME = "application/vnd.memlab.figures+json"
TAG = "figures"
AT_END = "figures-at-end"  # tag of a text
FOR_THE_TEXT = "for-the-text"  # tag of a code cell that readers do not get
REFUSED = "Not yet"  # what `memlab.check` prints for a wrong answer
SUFFIX = "-figures"  # an evaluating cell's id is the id of its text with this suffix
REPORT = "figures.json"  # written next to the folder of notebooks
VERDICT = re.compile(r"verdict\('(\w+)'")
# The source of an evaluating cell. If an expression raises, its error becomes the figure's value,
# and is reported like a figure that differs.
EVALUATE = """\
from memlab.book import verdict
_texts = []
for _figure in FIGURES:
    try:
        _texts.append(str(eval(_figure)))
    except Exception as _error:
        _texts.append(f"{type(_error).__name__}: {_error}")
get_ipython().display_pub.publish({MIME: _texts})"""


class Figure(NamedTuple):
    """A figure in a text.

    expression: the Python expression that gives it.
    says: the figure as the text has it.
    kind: exact, trained or timed.
    bound: the tolerance or factor, as text; empty for none.
    """

    expression: str
    says: str
    kind: str = "exact"
    bound: str = ""

    @classmethod
    def of(cls, match: re.Match) -> "Figure":
        expression, kind, bound, says = match.groups()
        expression, says = html.unescape(expression), html.unescape(says)
        claim = VERDICT.match(expression)
        if claim and rests_on_a_clock(claim[1]):
            return cls(expression, says, "timed", "")
        return cls(expression, says, kind or "exact", bound or "")

    def allows(self, value: str) -> bool:
        """Whether a run's value agrees with the text, within the tolerance."""
        if value == self.says:
            return True
        if self.kind == "exact" or not self.bound:
            return False
        # A text may hold several numbers, such as a range. Everything else in it must be equal.
        here, there = numbers(self.says), numbers(value)
        if len(here) != len(there) or words(self.says) != words(value):
            return False
        return all(self._near(*pair) for pair in zip(here, there, strict=True))

    def _near(self, here: float, there: float) -> bool:
        if self.bound.startswith("x"):
            low, high = sorted((abs(here), abs(there)))
            return high <= float(self.bound[1:]) * low
        share = self.bound.endswith("%")
        bound = float(self.bound.rstrip("%")) * (abs(here) / 100 if share else 1)
        return abs(here - there) <= bound * (1 + 1e-9)


def numbers(text: str) -> list[float]:
    """The numbers in a text, in order."""
    return [float(one.replace(",", "").replace("−", "-")) for one in NUMBER.findall(text)]


def words(text: str) -> str:
    """The text without its numbers."""
    return NUMBER.sub("", text)


def figures_of(cell: dict) -> list[Figure]:
    """The figures of a Markdown cell, in order."""
    matches = FIGURE.finditer(text_of(cell)) if cell["cell_type"] == "markdown" else ()
    return [Figure.of(match) for match in matches]


def text_of(cell: dict) -> str:
    """The source of a cell."""
    return "".join(cell["source"])


def with_figures(notebook: dict) -> dict:
    """The notebook with an evaluating cell for each text that has figures."""
    cells, last = [], []
    for cell in notebook["cells"]:
        cells.append(cell)
        figures = figures_of(cell)
        if figures:
            listed = "".join(f"\n    {figure.expression!r}," for figure in figures)
            source = EVALUATE.replace("FIGURES", f"[{listed}\n]").replace("MIME", repr(MIME))
            # Cells of `figures-at-end` go to the end of the notebook, to see all its variables.
            place = last if AT_END in cell["metadata"].get("tags", ()) else cells
            place.append(evaluating(cell["id"] + SUFFIX, source))
    return notebook | {"cells": cells + last}


def evaluating(name: str, source: str) -> dict:
    """A code cell that is hidden on the page and marked as one of this tool's cells."""
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {"tags": [TAG, "remove-cell"]},
        "outputs": [],
        "source": source,
    }


def without_figures(notebook: dict) -> tuple[dict, dict[str, list[str]]]:
    """(the notebook without the evaluating cells, id of a text -> values of its figures)."""
    cells, values = [], {}
    for cell in notebook["cells"]:
        if TAG in cell["metadata"].get("tags", ()):
            data = [output["data"] for output in cell["outputs"] if "data" in output]
            text = cell["id"].removesuffix(SUFFIX)
            values[text] = next((one[MIME] for one in data if MIME in one), [])
        else:
            cells.append(cell)
    return notebook | {"cells": cells}, values


def written(notebook: dict, values: dict[str, list[str]], keep=lambda figure, value: False) -> dict:
    """The notebook with the run's values in its texts.

    keep: keep(figure, value) is True for figures that stay as the text has them.
    """
    cells = []
    for cell in notebook["cells"]:
        run = iter(values.get(cell["id"], ()))

        def as_run(match, run=run):
            figure, value = Figure.of(match), next(run)
            if keep(figure, value):
                return match[0]
            start = match.start(4) - match.start()  # replace only the text inside the span
            return f"{match[0][:start]}{html.escape(value, quote=False)}</span>"

        if values.get(cell["id"]):
            text = FIGURE.sub(as_run, text_of(cell))
            cell = cell | {"source": text.splitlines(keepends=True)}
        cells.append(cell)
    return notebook | {"cells": cells}


def for_readers(notebook: dict) -> dict:
    """The notebook without the cells that only serve the text.

    Links to pages that are not notebooks are redirected to the repository, because a reader's copy
    of the notebook does not have those pages next to it.
    """
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    pages = f"]({config['repository']['url']}/blob/main/chapters/"
    cells = [c for c in notebook["cells"] if FOR_THE_TEXT not in c["metadata"].get("tags", ())]
    for cell in cells:
        if cell["cell_type"] == "markdown":
            cell["source"] = PAGE.sub(pages + r"\1", "".join(cell["source"]))
    return notebook | {"cells": cells}


def trouble(cell: dict) -> str:
    """What went wrong in a cell without ending the build, or an empty text.

    That is an error in a cell for the text, or a solution that `check` refuses.
    """
    for output in cell.get("outputs", ()):
        if output["output_type"] == "error":
            return f"{output['ename']}: {output['evalue']}"
        said = "".join(output.get("text", ()))
        if "solution" in cell["id"] and REFUSED in said:
            return said.strip()
    return ""


def compared(notebook: dict, values: dict[str, list[str]], chapter: str) -> list[dict]:
    """Rows that compare each figure's text with the run's value, and rows for cells that failed."""
    rows = []
    for cell in notebook["cells"]:
        if wrong := trouble(cell):
            figure = Figure("the cell", "no trouble")
            place = {"chapter": chapter, "cell": cell["id"], "run": wrong}
            rows.append(place | figure._asdict() | {"agrees": False})
        # Without values the evaluating cell has not run: every figure of the text is wrong.
        figures = figures_of(cell)
        run = values.get(cell["id"]) or ["nothing"] * len(figures)
        for figure, value in zip(figures, run, strict=True):
            place = {"chapter": chapter, "cell": cell["id"], "run": value}
            rows.append(place | figure._asdict() | {"agrees": figure.allows(value)})
    return rows


def is_wrong(row: dict) -> bool:
    """Whether a row makes `make test` fail; measured times never do."""
    return not row["agrees"] and row["kind"] != "timed"


def line(row: dict) -> str:
    """A row as one line of text."""
    bound = f" {row['kind']} ± {row['bound']}" if row["kind"] == "trained" else ""
    place = f"{row['chapter']}, {row['cell']}"
    return (
        f"{place}: the text says {row['says']}{bound}, the run {row['run']} ({row['expression']})"
    )


def summary(rows: list[dict]) -> str:
    """Counts of figures by kind and of those that differ, then one line per wrong figure."""
    of = Counter(row["kind"] for row in rows)
    off = Counter(row["kind"] for row in rows if row["run"] != row["says"])
    counts = ", ".join(f"{of[kind]} {kind} ({off[kind]} differ)" for kind in sorted(of))
    wrong = [line(row) for row in rows if is_wrong(row)]
    lines = [f"Figures of the text: {counts}. Out of bounds: {len(wrong)}.", *wrong]
    return "\n".join(lines)


def read(file: Path) -> dict:
    """The notebook in a file."""
    return json.loads(file.read_text(encoding="utf-8"))


def store(file: Path, notebook: dict) -> None:
    """Write a notebook in the format of Jupyter."""
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def compare(folder: Path, to: Path | None, left_out: list[str]) -> None:
    """The action `compare`, or `write` if `to` is given.

    folder: the executed notebooks; they are rewritten.
    to: the folder whose notebooks get corrected figures.
    left_out: names of notebooks that were not run; their texts stay as they are.
    """
    rows = []
    for file in sorted(folder.glob("*.ipynb")):
        notebook, values = without_figures(read(file))
        if file.stem in left_out:
            store(file, notebook)
            continue
        found = compared(notebook, values, file.stem)
        rows += found
        # A verdict stays as the author wrote it; `is_wrong` reports one that differs.
        store(file, written(notebook, values, lambda figure, _: VERDICT.match(figure.expression)))
        # Only figures that are out of bounds change, so that a diff shows no noise.
        if to and any(map(is_wrong, found)):

            def agrees(figure, value):
                return figure.kind == "timed" or figure.allows(value)

            store(to / file.name, written(read(to / file.name), values, agrees))
    (folder.parent / REPORT).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(summary(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("act", choices=("put", "compare", "check", "write", "readers"))
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--left-out", nargs="*", default=[], help="with compare: were not run")
    asked = parser.parse_args()
    folder, *more = asked.folders
    if asked.act == "put":
        for file in sorted(folder.glob("*.ipynb")):
            store(file, with_figures(read(file)))
    elif asked.act == "readers":
        for file in sorted(folder.glob("*.ipynb")):
            store(file, for_readers(read(file)))
    elif asked.act == "check":
        rows = json.loads((folder.parent / REPORT).read_text(encoding="utf-8"))
        wrong = [line(row) for row in rows if is_wrong(row)]
        if wrong:
            sys.exit(
                "\n".join([*wrong, "Figures of the text are wrong for this run: make figures"])
            )
    else:
        compare(folder, more[0] if more else None, asked.left_out)


if __name__ == "__main__":
    main()
