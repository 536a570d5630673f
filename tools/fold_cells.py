"""Fold the cells on Colab, Kaggle and JupyterLab that the book's pages hide or fold.

    python tools/fold_cells.py           write the metadata into the chapters
    python tools/fold_cells.py --check   list the chapters without it; exit with status 1 if any

Jupyter Book reads a cell's tags, which the other three do not know. Each of them has its own
metadata: Colab `cellView`, Kaggle `_kg_hide-input` and `_kg_hide-output`, JupyterLab (and nbformat)
`jupyter.source_hidden` and `jupyter.outputs_hidden`. Colab's folds leave the output visible.

The output of a removed cell stays visible in a live notebook, because it can only be an error.
"""

import json
import sys
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
FOLDED = {"hide-input", "remove-input", "hide-cell", "remove-cell"}
OUTPUT_TOO = {"hide-cell"}


def stamped(cell: dict) -> dict:
    """The metadata of a code cell, folded for each of the three tools or for none."""
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
    """Whether a notebook's metadata already matched its tags; unless `check`, correct it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    wanted = [stamped(cell) for cell in cells]
    if wanted == [cell["metadata"] for cell in cells]:
        return True
    if not check:
        for cell, metadata in zip(cells, wanted, strict=True):
            if cell["metadata"] != metadata:  # equal metadata keeps the order of its keys
                cell["metadata"] = metadata
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    return False


if __name__ == "__main__":
    check = sys.argv[1:] == ["--check"]
    changed = [path.name for path in sorted(CHAPTERS.glob("*.ipynb")) if not stamp(path, check)]
    if check and changed:
        sys.exit(f"{', '.join(changed)}: cells are not folded as their tags say: make format")
