"""Fold on Colab, Kaggle and JupyterLab what the book's page hides or folds.

    python tools/fold_cells.py           write it into the chapters
    python tools/fold_cells.py --check   say which chapters lack it; status 1 if any does

Jupyter Book goes by a cell's tags, which the three others do not know. Each has its own metadata:
Colab `cellView`, Kaggle `_kg_hide-input` and `_kg_hide-output`, JupyterLab (and nbformat)
`jupyter.source_hidden` and `jupyter.outputs_hidden`. Colab's folds leave the output in sight.

What a removed cell prints stays in sight in a live notebook: it is an error, if anything.
"""

import json
import sys
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
FOLDED = {"hide-input", "remove-input", "hide-cell", "remove-cell"}
OUTPUT_TOO = {"hide-cell"}


def stamped(cell: dict) -> dict:
    """The metadata of a code cell with each reader's own word for folded, or without it."""
    own = "cellView", "_kg_hide-input", "_kg_hide-output", "source_hidden", "outputs_hidden"
    kept = {k: v for k, v in cell["metadata"].items() if k not in own}
    jupyter = {k: v for k, v in kept.pop("jupyter", {}).items() if k not in own}
    tags = set(kept.get("tags", ()))
    if FOLDED & tags:
        kept |= {"cellView": "form", "_kg_hide-input": True}
        jupyter["source_hidden"] = True
    if OUTPUT_TOO & tags:
        kept["_kg_hide-output"] = jupyter["outputs_hidden"] = True
    return kept | ({"jupyter": jupyter} if jupyter else {})


def stamp(path: Path, check: bool = False) -> bool:
    """Whether a notebook was as its tags ask; it is written anew if not, unless `check`."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    wanted = [stamped(cell) for cell in cells]
    if wanted == [cell["metadata"] for cell in cells]:
        return True
    if not check:
        for cell, metadata in zip(cells, wanted, strict=True):
            if cell["metadata"] != metadata:  # equal ones keep their order
                cell["metadata"] = metadata
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    return False


if __name__ == "__main__":
    check = sys.argv[1:] == ["--check"]
    changed = [path.name for path in sorted(CHAPTERS.glob("*.ipynb")) if not stamp(path, check)]
    if check and changed:
        sys.exit(f"{', '.join(changed)}: cells are not folded as their tags say: make format")
