"""What the tools of the repository make: versions, executed notebooks."""

import re
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == project["version"]


def test_colabs_libraries_are_taken_where_they_are_new_enough():
    sys.path.insert(0, str(ROOT / "tools"))
    from try_versions import dependencies, on_colab

    freeze = """
torch @ https://download.pytorch.org/whl/cu128/torch-2.14.1%2Bcu128-cp312-cp312-linux_x86_64.whl#x
numpy==2.0.2
peft==0.17.0
ml_dtypes==0.5.3
transformers==5.24.0+local
"""
    own = ["torch>=2.11", "numpy>=2.0", "peft>=0.21", "ml-dtypes>=0.5", "transformers>=5.23"]
    wanted = ["torch==2.14.1", "numpy==2.0.2", "peft>=0.21", "ml-dtypes==0.5.3"]
    assert on_colab(freeze, own) == [*wanted, "transformers==5.24.0"]
    assert all(re.fullmatch(r"\w[\w.-]*>=[\d.]+", line) for line in dependencies())


def test_executed_notebooks_keep_what_their_page_shows():
    sys.path.insert(0, str(ROOT / "tools"))
    from drop_leftovers import VIEW, without_leftovers

    bar = {"output_type": "display_data", "data": {VIEW: {}, "text/plain": "0%"}}
    panel = {"output_type": "display_data", "data": {VIEW: {}, "text/html": "<p>still"}}
    text = "\rplanning [00:01]\r                \ra warning\n\r 50%|##  |\r          \r"
    said = {"output_type": "stream", "name": "stderr", "text": text}
    wiped = said | {"text": ["\rplanning [00:01]", "\r                \r"]}
    printed = {"output_type": "stream", "name": "stdout", "text": "a figure"}

    def cell(*tags):
        outputs = [bar | {"data": dict(bar["data"])}, panel | {"data": dict(panel["data"])}]
        return {
            "cell_type": "code",
            "metadata": {"tags": list(tags)},
            "outputs": [*outputs, dict(said), dict(wiped), printed],
        }

    notebook = {"cells": [cell(), cell("remove-stderr")], "metadata": {"widgets": {}}}
    shown, quiet = (one["outputs"] for one in without_leftovers(notebook)["cells"])
    still = {"output_type": "display_data", "data": {"text/html": "<p>still"}}
    warned = said | {"text": text.partition("\n")[0]}
    assert (shown, quiet) == ([still, warned, printed], [still, printed])
    assert notebook["metadata"] == {}
