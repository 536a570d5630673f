"""What others find in the repository: workflows that call make, forms, a package of its own."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
COUNTED = ROOT / "tools" / "count_pages.py"


def steps(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_make_and_has_no_logic_of_its_own(path):
    for command in (step["run"] for step in steps(path) if "run" in step):
        assert re.fullmatch(
            r'\.ci/run \$\{\{ matrix\.targets? \}\}|make [a-z-]+( [A-Z]+="\$[A-Z]+")?', command
        ), command
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", MAKEFILE, re.MULTILINE), command


def test_the_parts_of_make_test_run_beside_each_other():
    file = ROOT / ".github" / "workflows" / "test.yml"
    job = yaml.safe_load(file.read_text())["jobs"]["test"]
    listed = [one for part in job["strategy"]["matrix"]["targets"] for one in part.split()]
    first, rest = re.search(r"^test: (\w+)\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE).groups()
    assert listed == [first, *re.findall(r"MAKE\) ([\w-]+)", rest)]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=str)
def test_an_issue_form_is_one(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    assert all(one["attributes"]["label"] for one in form["body"])


def test_the_readme_is_of_one_screen_and_says_the_test_command():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 60 and re.search(r"^make test ", text, re.MULTILINE)
    for path in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (ROOT / path).exists(), path


def test_a_page_that_has_not_come_out_is_named(tmp_path):
    toc = {"root": "a", "parts": [{"chapters": [{"file": "b", "sections": [{"file": "c"}]}]}]}
    for name in "ac":
        (tmp_path / f"{name}.html").touch()
    code = f"import runpy; m = runpy.run_path({str(COUNTED)!r}); from pathlib import Path; "
    code += f"print(m['missing']({toc!r}, Path({str(tmp_path)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['b']"


def test_what_only_the_book_needs_only_the_book_imports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {re.match(r"\w+", line)[0] for line in project["optional-dependencies"]["book"]}
    for path in (ROOT / "memlab").rglob("*.py"):
        if path.is_relative_to(ROOT / "memlab" / "book"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not extra & {name.partition(".")[0] for name in names}, path
            assert not any(name.startswith("memlab.book") for name in names), path


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
