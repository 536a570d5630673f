"""Execute chapters on a stand-in for a GPU (`standin_card.py`), to see whether they run on a GPU.

    python tools/run_on_standin.py T4                             every chapter
    python tools/run_on_standin.py H100 04-accumulation 14-attention

A failing cell ends its chapter with a traceback, and the run fails. The chapters are executed as
copies in a temporary folder, because outputs of the stand-in belong on no page. Two kinds of cells
are skipped. Those with the tag `real-gpu` train at a size that only a real GPU can hold. Those with
`no-standin` call `torch.compile`, which would compile the stand-in too.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent


def without_real_gpu(notebook):
    """The notebook with the tag that makes nbclient skip a cell, where the stand-in needs it."""
    for cell in notebook.cells:
        if {"real-gpu", "no-standin"} & set(cell.metadata.get("tags", [])):
            cell.metadata.tags.append("skip-execution")
    return notebook


def main(card: str, *names: str) -> int:
    chapters = ROOT / "chapters"
    files = [chapters / f"{name}.ipynb" for name in names] or sorted(chapters.glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for file in files:
            nbformat.write(without_real_gpu(nbformat.read(file, as_version=4)), folder / file.name)
        kernel = folder / "jupyter" / "kernels" / "standin" / "kernel.json"
        kernel.parent.mkdir(parents=True)
        command = [sys.executable, str(ROOT / "tools" / "standin_card.py"), card]
        said = {"argv": [*command, "-f", "{connection_file}"], "display_name": card}
        kernel.write_text(json.dumps(said | {"language": "python"}))
        where = {"JUPYTER_PATH": str(folder / "jupyter"), "PYTHONPATH": str(ROOT)}
        options = "--nbmake --nbmake-kernel=standin --nbmake-timeout=900"
        options += " -n 2 --durations=0 -p no:cacheprovider"
        run = [sys.executable, "-m", "pytest", *options.split(), "."]
        return subprocess.run(run, cwd=folder, env={**os.environ, **where}).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
