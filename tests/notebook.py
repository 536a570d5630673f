"""A chapter's own cells, run in a test."""

from pathlib import Path

import nbformat
import pytest

import memlab
from memlab.book import three_steps

CHAPTERS = Path(__file__).parent.parent / "chapters"


class Notebook:
    """Cells of one chapter by their ids: `code`, and `text` in Markdown."""

    def __init__(self, name):
        cells = nbformat.read(CHAPTERS / f"{name}.ipynb", as_version=4).cells
        self.code, self.text = (
            {cell.id: cell.source for cell in cells if cell.cell_type == kind}
            for kind in ("code", "markdown")
        )

    def run(self, names, namespace=None):
        """Run the cells with these ids (one string, apart by spaces); give their namespace."""
        namespace = {} if namespace is None else namespace
        namespace.setdefault("memlab", memlab)  # which the install cell brings
        for name in names.split():
            exec(compile(self.code[name], f"cell {name}", "exec"), namespace)
        return namespace


def cells_of(name, cells):
    """A fixture: the namespace of a chapter's cells, which are run once for a file."""

    @pytest.fixture(scope="module")
    def namespace():
        return Notebook(name).run(cells)

    return namespace


def assert_steps_agree(mine, step, library):
    """Three steps by a shown loop, over a training's parts, are those of memlab's own training.

    They have the same losses, and the third the same peak and the same breakdown.
    """
    (losses, footprint), (their_losses, theirs) = three_steps(mine, step), three_steps(library)
    assert losses == their_losses
    assert footprint.peak_allocated == theirs.peak_allocated
    assert footprint.breakdown == theirs.breakdown
