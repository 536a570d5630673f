"""A chapter's own cells, run in a test."""

from pathlib import Path

import nbformat

CHAPTERS = Path(__file__).parent.parent / "chapters"


class Notebook:
    """Code cells of one chapter by their ids."""

    def __init__(self, name):
        self.cells = nbformat.read(CHAPTERS / f"{name}.ipynb", as_version=4).cells
        self.code = {cell.id: cell.source for cell in self.cells if cell.cell_type == "code"}

    def run(self, names, namespace=None):
        """Run the cells with these ids (one string, apart by spaces); give their namespace."""
        namespace = {} if namespace is None else namespace
        for name in names.split():
            exec(compile(self.code[name], f"cell {name}", "exec"), namespace)
        return namespace
