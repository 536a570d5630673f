"""Remove outputs from executed notebooks that their pages must not show.

    python tools/drop_leftovers.py NOTEBOOK...

It removes widgets, which need a kernel, progress bars that have ended, and messages of libraries on
the error stream of cells with the tag `remove-stderr`.
"""

import json
import sys
from pathlib import Path

VIEW = "application/vnd.jupyter.widget-view+json"


def shown(output: dict, tags: list[str]) -> bool:
    """Whether a page shows this output. A widget with a static picture becomes that picture."""
    data = output.get("data", {})
    if data.pop(VIEW, None) is not None and "text/html" not in data:
        return False
    if output.get("name") != "stderr":
        return True
    lines = "".join(output["text"]).split("\n")
    output["text"] = "\n".join(line for line in lines if not wiped(line))
    return bool(output["text"]) and "remove-stderr" not in tags


def wiped(line: str) -> bool:
    """Whether a terminal ends up with an empty line, as after a progress bar that was erased."""
    # A carriage return starts the line again, so the last part is what stays visible.
    parts = [part for part in line.split("\r") if part]
    return "\r" in line and not (parts and parts[-1].strip())


def without_leftovers(notebook: dict) -> dict:
    """The notebook with only the outputs that its page shows; changed in place."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            tags = cell["metadata"].get("tags", [])
            cell["outputs"] = [one for one in cell["outputs"] if shown(one, tags)]
    notebook["metadata"].pop("widgets", None)
    return notebook


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        notebook = without_leftovers(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
