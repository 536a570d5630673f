"""A chapter's own cells, run in a test."""

from pathlib import Path

import nbformat
import pytest
import torch

import memlab
from memlab.trace.tracer import Tracer

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


def traced(training, step):
    """Losses of three steps, and the footprint of the third."""
    torch.manual_seed(1)
    losses = [step(), step()]
    tracer = Tracer()
    tracer.watch(training.model, training.optimizer)
    with tracer:
        losses.append(step())
    return losses, tracer.footprint()


def assert_steps_agree(mine, step, library):
    """Three steps by a shown loop, over a training's parts, are those of memlab's own training."""
    assert_same_run(traced(mine, step), traced(library, library.step))


def assert_same_run(ours, theirs):
    """Two runs of `traced` have the same losses, the same peak and the same breakdown."""
    (losses, footprint), (their_losses, their_footprint) = ours, theirs
    assert losses == their_losses
    assert footprint.peak_allocated == their_footprint.peak_allocated
    assert footprint.breakdown == their_footprint.breakdown
