"""A chapter's own cells, run in a test."""

import ast
import re
from html import unescape
from pathlib import Path

import nbformat
import torch

from memlab.book.claims import verdict
from memlab.trace.tracer import Tracer

CHAPTERS = Path(__file__).parent.parent / "chapters"


class Notebook:
    """Cells of one chapter by their ids: `code`, and `text` in Markdown."""

    def __init__(self, name):
        self.cells = nbformat.read(CHAPTERS / f"{name}.ipynb", as_version=4).cells
        self.code, self.text = (
            {cell.id: cell.source for cell in self.cells if cell.cell_type == kind}
            for kind in ("code", "markdown")
        )

    def run(self, names, namespace=None):
        """Run the cells with these ids (one string, apart by spaces); give their namespace."""
        namespace = {} if namespace is None else namespace
        for name in names.split():
            exec(compile(self.code[name], f"cell {name}", "exec"), namespace)
        return namespace

    def verdict(self, id, names):
        """The word that the text's own expression gives of a statement, from these names."""
        fold = next(t for t in self.text.values() if f'id="claim-{id.lower()}"' in t)
        expression = unescape(re.search(r'data-figure="(verdict[^"]*)"', fold)[1])
        deciding = [ast.parse(self.code[n]).body for n in self.code if n.startswith("decides")]
        needed, steps = named(ast.parse(expression), ast.Load), []
        for step in reversed(sum(deciding, [])):
            if named(step, ast.Store) & needed:
                needed |= named(step, ast.Load)
                steps.insert(0, step)
        exec(compile(ast.Module(steps, []), f"what decides {id}", "exec"), names)
        return eval(expression, {"verdict": verdict} | names).partition(" ")[2]

    def check_exercise(self, number, wrong, namespace, capsys):
        """An exercise waits for an answer, takes its own solution, and tells a wrong one so."""
        *before, asked = [name for name in self.code if name.startswith(f"exercise-{number}")]
        self.run(" ".join([*before, asked]), namespace)
        assert "Not answered yet" in capsys.readouterr().out
        self.run(f"solution-{number}", namespace)  # asserts that its own check passes
        capsys.readouterr()
        source = self.code[asked].replace("answer = ...", f"answer = {wrong!r}")
        exec(source, namespace)
        assert "Not yet" in capsys.readouterr().out


def named(tree, context):
    """The names that a piece of code loads, or stores."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    found = {node.id for node in nodes if isinstance(node.ctx, context)}
    made = context is ast.Store and isinstance(tree, ast.FunctionDef)
    return found | {tree.name} if made else found


def traced(training, step):
    """Losses of three steps, and the footprint of the third."""
    torch.manual_seed(1)
    losses = [step(), step()]
    tracer = Tracer()
    tracer.watch(training.model, training.optimizer)
    with tracer:
        losses.append(step())
    return losses, tracer.footprint()


def assert_same_run(ours, theirs):
    """Two runs of `traced` have the same losses, the same peak and the same breakdown."""
    (losses, footprint), (their_losses, their_footprint) = ours, theirs
    assert losses == their_losses
    assert footprint.peak_allocated == their_footprint.peak_allocated
    assert footprint.breakdown == their_footprint.breakdown
