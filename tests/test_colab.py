"""A chapter opened alone, as Colab and Kaggle do it: no checkout, their own torch, one cell first.

The environment is new. It sees this environment's packages as the ones preinstalled there, all but
memlab. Git takes a copy of this working tree where the cell names the address on GitHub.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import nbformat
import pytest
from contents import ROOT
from test_chapters import ADDRESS, FIRST_CELL

FACTS = """
import json
from importlib.resources import files
print(json.dumps({
    "memlab": memlab.__file__,
    "data": sorted(str(p.name) for p in (files("memlab") / "data").iterdir() if p.is_file()),
}))
"""
RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
nbformat.write(notebook, sys.argv[1])
"""


def published_repository(folder):
    """The working tree as it stands, committed to a repository that pip can clone."""
    folder.mkdir()
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for step in (["init", "-q", "-b", "main"], ["add", "-A"], [*who, "commit", "-qm", "snapshot"]):
        there = ["git", f"--git-dir={folder / '.git'}", f"--work-tree={ROOT}"]
        subprocess.run([*there, *step], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """The environment: its python, and the variables under which it runs."""
    home = tmp_path_factory.mktemp("colab")
    published_repository(home / "published")

    preinstalled = home / "preinstalled"
    preinstalled.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        own = "memlab" in entry.name or entry.name.startswith("gpu_memory_lab")
        if not own and entry.suffix != ".pth" and entry.name != "__pycache__":
            (preinstalled / entry.name).symlink_to(entry)
    venv.create(home / "env", with_pip=True)
    python = home / "env" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout
    # The new environment's own setuptools is older than the preinstalled one, and would hide it.
    for pattern in ("setuptools*", "pkg_resources", "_distutils_hack"):
        for entry in Path(site.strip()).glob(pattern):
            shutil.rmtree(entry)
    (Path(site.strip()) / "distutils-precedence.pth").unlink(missing_ok=True)
    (Path(site.strip()) / "preinstalled.pth").write_text(f"{preinstalled}\n")

    elsewhere = home / "content"
    elsewhere.mkdir()
    variables = {
        **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{(home / 'published').as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": ADDRESS,
        "JUPYTER_DATA_DIR": str(home / "jupyter"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    return python, Path(site.strip()), elsewhere, variables


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the environment is laid out as on Linux")
def test_the_first_cell_runs_in_an_environment_without_the_checkout(colab):
    python, site, elsewhere, variables = colab

    def run(*command):
        return subprocess.run(
            [python, *command], cwd=elsewhere, env=variables, capture_output=True, text=True
        )

    before = {entry.name for entry in site.iterdir()}
    assert "No module named 'memlab'" in run("-c", "import memlab").stderr

    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(code) for code in (FIRST_CELL, FACTS)]
    nbformat.write(notebook, elsewhere / "chapter.ipynb")
    done = run("-c", RUN, "chapter.ipynb")
    assert done.returncode == 0, done.stderr[-3000:]

    printed = nbformat.read(elsewhere / "chapter.ipynb", as_version=4).cells[1].outputs[0].text
    facts = json.loads(printed)
    assert Path(facts["memlab"]).parent == site / "memlab"
    # The install brought memlab and nothing else: torch and numpy are the ones that were there.
    new = {entry.name for entry in site.iterdir()} - before
    assert {name.split("-")[0] for name in new} == {"memlab", "gpu_memory_lab"}
    data = {path.name for path in (ROOT / "memlab" / "data").iterdir() if path.is_file()}
    assert set(facts["data"]) == data


def test_a_memlab_that_is_there_is_not_installed_again(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "-c", FIRST_CELL.replace("%pip", "%no_such_magic")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
