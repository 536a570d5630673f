"""What the tools of the repository make: versions, executed notebooks."""

import copy
import tomllib

import yaml
from contents import ROOT
from drop_leftovers import VIEW, without_leftovers


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == project["version"]


def test_executed_notebooks_keep_what_their_page_shows():
    def widget(**data):
        return {"output_type": "display_data", "data": {VIEW: {}} | data}

    def stream(name, text):
        return {"output_type": "stream", "name": name, "text": text}

    bar, printed = "\rplanning [00:01]\r                \r", stream("stdout", "a figure")
    given = [widget(text="0%"), widget(**{"text/html": "still"}), printed]
    given += [stream("stderr", [bar, bar]), stream("stderr", f"{bar}a warning\n{bar}")]
    notebook = {"cells": [], "metadata": {"widgets": {}}}
    for tags in ([], ["remove-stderr"]):
        cell = {"cell_type": "code", "metadata": {"tags": tags}, "outputs": given}
        notebook["cells"].append(copy.deepcopy(cell))
    shown, quiet = (cell["outputs"] for cell in without_leftovers(notebook)["cells"])
    assert quiet == [{"output_type": "display_data", "data": {"text/html": "still"}}, printed]
    assert shown == [*quiet, stream("stderr", f"{bar}a warning")]
    assert notebook["metadata"] == {}
