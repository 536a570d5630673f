"""What the tools of the repository make: versions, executed notebooks."""

import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from drop_leftovers import VIEW, without_leftovers  # noqa: E402


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == project["version"]


def test_executed_notebooks_keep_what_their_page_shows():
    def widget(**data):
        return {"output_type": "display_data", "data": {VIEW: {}} | data}

    def stderr(text):
        return {"output_type": "stream", "name": "stderr", "text": text}

    printed = {"output_type": "stream", "name": "stdout", "text": "a figure"}
    bar, wiped = "\rplanning [00:01]\r                \r", ["\rplanning [00:01]", "\r          \r"]
    cells = [
        {
            "cell_type": "code",
            "metadata": {"tags": tags},
            "outputs": [widget(text="0%"), widget(**{"text/html": "still"}),
                        stderr(f"{bar}a warning\n{bar}"), stderr(wiped), printed],
        }
        for tags in ([], ["remove-stderr"])
    ]  # fmt: skip
    made = without_leftovers({"cells": cells, "metadata": {"widgets": {}}})
    still = {"output_type": "display_data", "data": {"text/html": "still"}}
    shown = [still, stderr(f"{bar}a warning"), printed]
    assert [cell["outputs"] for cell in made["cells"]] == [shown, [still, printed]]
    assert made["metadata"] == {}
