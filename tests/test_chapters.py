"""The chapters as they are stored: what a reader of the source, of Colab and of a diff sees."""

import ast
import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from contents import listed_pages
from shapes import shape, statements

import memlab
import memlab.book
import memlab.panels

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import fold_cells  # noqa: E402
import set_address  # noqa: E402

CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
ADDRESS = CONFIG["repository"]["url"]
NOTEBOOKS = sorted((ROOT / "chapters").glob("*.ipynb"))
NUMBERED = [p for p in NOTEBOOKS if p.name[:2].isdigit() and not p.stem.endswith("-deeper")]
FIRST_CELL = f"""\
# Colab and Kaggle: installs memlab beside their own torch.
try:
    import memlab
except ImportError:
    lab = "git+{ADDRESS}"
    %pip install -q "gpu-memory-lab[book] @ {{lab}}"
    import memlab"""

each_chapter = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell):
    return set(cell.metadata.get("tags", ()))


def lines(cell):
    return [line for line in cell.source.splitlines() if line.strip()]


def test_the_table_of_contents_and_the_folder_agree():
    listed = listed_pages()
    pages = [*NOTEBOOKS, *(ROOT / "chapters").glob("*.md")]
    assert len(listed) == len(set(listed))
    assert set(listed) == {path.relative_to(ROOT).with_suffix("").as_posix() for path in pages}


def modules_imported(path):
    for cell in code_cells(path):
        plain = [line for line in cell.source.splitlines() if not line.lstrip().startswith("%")]
        for node in ast.walk(ast.parse("\n".join(plain))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module.split(".")[0]


@each_chapter
def test_the_first_cell_brings_what_the_others_import(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()  # whose cells ask whether they are here
    needed = [*project["dependencies"], *itertools.chain(*extras)]
    brought = {re.match(r"[\w-]+", line)[0] for line in needed}
    # Jupyter brings IPython, transformers its tokenizers.
    there = brought | {"memlab", "IPython", "tokenizers"} | set(sys.stdlib_module_names)
    missing = set(modules_imported(path)) - there
    assert missing == set()


@each_chapter
def test_a_fold_does_not_give_the_answer_away(path):
    """JupyterLab shows a folded cell's first line."""
    for cell in filter(lambda cell: fold_cells.FOLDED & tags(cell), code_cells(path)):
        label = cell.metadata.get("mystnb", {}).get("code_prompt_show", "")
        if label.startswith("Solution"):
            assert lines(cell)[0] == f"# {label}", cell.id
        elif re.search("-(truth|right|wanted)$", cell.id):
            assert lines(cell)[0].startswith("# What the check compares with"), cell.id


@each_chapter
def test_prose_has_no_block_that_a_live_notebook_shows_as_its_source(path):
    """Of MyST they know nothing: a dropdown stands open, a label as it is, a `[](page)` empty."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            found = re.search(r"^(:::|```\{|\([\w-]+\)=)|\[\]\(", cell.source, re.MULTILINE)
            assert found is None, f"{cell.id}: {found[0]}"


def test_folding_follows_the_tags_and_leaves_the_rest(tmp_path):
    cells = [
        {"cell_type": "code", "metadata": {"tags": ["hide-input"], "mystnb": {"x": 1}}},
        {"cell_type": "code", "metadata": {"cellView": "form", "jupyter": {"source_hidden": True}}},
        {"cell_type": "code", "metadata": {"tags": ["hide-cell"]}},
        {"cell_type": "markdown", "metadata": {"tags": ["remove-cell"]}},
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert not fold_cells.stamp(path, check=True) and json.loads(path.read_text())["cells"] == cells
    assert not fold_cells.stamp(path)
    folded, opened, whole, prose = (
        cell["metadata"] for cell in json.loads(path.read_text())["cells"]
    )
    assert folded == cells[0]["metadata"] | {
        "cellView": "form",
        "_kg_hide-input": True,
        "jupyter": {"source_hidden": True},
    }
    assert whole["jupyter"] == {"source_hidden": True, "outputs_hidden": True}
    assert whole["_kg_hide-input"] and whole["_kg_hide-output"]
    assert opened == {} and prose == cells[3]["metadata"]
    assert fold_cells.stamp(path, check=True)


@each_chapter
def test_kernel_is_plain_python(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec == {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    assert set(notebook.metadata) <= {"kernelspec", "execution", "mystnb", "accelerator", "colab"}


@each_chapter
def test_first_code_cell_is_the_install_cell(path):
    assert code_cells(path)[0].source == FIRST_CELL


@each_chapter
def test_cells_are_short(path):
    assert max(len(lines(cell)) for cell in code_cells(path)) <= 30


@each_chapter
def test_a_title_and_prose_before_code(path):
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown" and re.match(r"# \S", cells[0].source)


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_a_numbered_chapter_has_a_checked_exercise(path):
    assert any(re.search(r"\bcheck\(", cell.source) for cell in code_cells(path))


def trees(path):
    """The parsed code cells of a chapter, without lines that only a notebook understands."""
    for cell in code_cells(path):
        plain = re.sub(r"^(\s*)[%!].*$", r"\1pass", cell.source, flags=re.MULTILINE)
        yield ast.parse(plain)


def twins(functions, least=3):
    """Places of functions of the same shape and `least` statements or more, a list for each shape.

    functions: (place, function), a place being a chapter and a name.
    """
    homes = {}
    for place, function in functions:
        if statements(function) >= least:
            homes.setdefault(shape(function), []).append(place)
    return [where for where in homes.values() if len({chapter for chapter, _ in where}) > 1]


def test_no_function_is_written_out_in_two_chapters():
    functions = [
        ((path.stem, node.name), node)
        for path in NOTEBOOKS
        for tree in trees(path)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 100
    assert twins(functions) == []


THREE_STEPS = """
def three_steps(training, step):
    torch.manual_seed(1)
    losses = [step(), step()]
    with Meter(device, training.model) as meter:
        losses.append(step())
    return losses, f"{meter.footprint.peak_allocated} bytes"
"""


@pytest.mark.parametrize(
    "old, new, same",
    [
        ("three_steps", "losses_and_peak", True),  # another name of the function
        ("losses", "seen", True),  # of a local variable
        ("step", "go", True),  # of an argument
        ("manual_seed(1)", "manual_seed(7)", True),  # another constant
        ("):\n    torch", '):\n    """With words."""\n    torch', True),
        ("} bytes", "} B", True),  # another text
        ("torch", "numpy", False),  # another library
        ("training.model", "training.inputs", False),  # another part of the same thing
        ("    torch.manual_seed(1)\n", "", False),  # a statement less
        ("[step(), step()]", "[step()]", False),
        ("return losses, ", "return ", False),
    ],
)
def test_a_function_under_another_name_is_found(old, new, same):
    changed = THREE_STEPS.replace(old, new)
    assert changed != THREE_STEPS
    pair = [ast.parse(source).body[0] for source in (THREE_STEPS, changed)]
    chapters = [("04", pair[0].name), ("06", pair[1].name)]
    found = twins(zip(chapters, pair, strict=True))
    assert found == ([chapters] if same else [])


def test_what_is_short_or_in_one_chapter_is_no_twin():
    short = ast.parse("def peak(run):\n    return run.peak").body[0]
    assert twins([(("04", "peak"), short), (("05", "peak"), short)]) == []
    long = ast.parse(THREE_STEPS).body[0]
    assert twins([(("04", "one"), long), (("04", "other"), long)]) == []


# Rooms behind the door that a chapter names because they are its subject.
ROOMS = {
    "01-measuring": {"memlab.trace.allocator"},
    "14-attention-deeper": {"memlab.card.kernels.sdpa"},
    "15-ablation": {"memlab.export.training_script", "memlab.predict.script"},
    "16-planner": {"memlab.export.memlab_lines", "memlab.export.training_script"},
    "17-parallel": {"memlab.predict.simulate"},
    "record": {
        "memlab.evidence.grid",
        "memlab.evidence.plausibility",
        "memlab.evidence.recording",
        "memlab.predict.on_cpu",
    },
    "accuracy": {
        "memlab.card.kernels.rules",
        "memlab.card.step_time",
        "memlab.predict.fit",
        "memlab.predict.on_cpu",
        "memlab.predict.run",
        "memlab.workloads.training",
    },
}


def imports_of_memlab(path):
    """(module, name) of everything that a chapter imports from memlab; a module alone has ""."""
    for node in itertools.chain.from_iterable(map(ast.walk, trees(path))):
        if isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.startswith("memlab"))
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("memlab"):
            yield from ((node.module, alias.name) for alias in node.names)


@each_chapter
def test_a_chapter_comes_in_by_the_door(path):
    allowed = {("memlab", ""), *(("memlab", name) for name in memlab.__all__)}
    for door in (memlab.book, memlab.panels):
        allowed |= {(door.__name__, name) for name in door.__all__}
    inside = set(imports_of_memlab(path)) - allowed
    rooms = ROOMS.get(path.stem, ())
    strangers = {
        (module, name)
        for module, name in inside
        if not any(
            f"{place}.".startswith(f"{room}.")
            for room in rooms
            for place in (module, f"{module}.{name}")
        )
    }
    assert strangers == set()


def test_every_exception_is_used():
    for stem, rooms in ROOMS.items():
        modules = {module for module, _ in imports_of_memlab(ROOT / "chapters" / f"{stem}.ipynb")}
        modules |= {
            f"{module}.{name}"
            for module, name in imports_of_memlab(ROOT / "chapters" / f"{stem}.ipynb")
        }
        assert rooms <= modules, stem


@pytest.mark.parametrize("path", ["README.md", "chapters/index.md"])
def test_examples_outside_of_chapters_come_in_by_the_door(path):
    named = re.findall(
        r"^from (memlab[\w.]*) import (.+)$", (ROOT / path).read_text(), re.MULTILINE
    )
    for module, names in named:
        assert module == "memlab" and set(names.split(", ")) <= set(memlab.__all__)


@each_chapter
def test_no_chapter_reaches_into_the_simulated_card(path):
    assert [n for n in map(ast.dump, trees(path)) if "attr='tracer'" in n] == []


def tracked_texts():
    for name in set_address.files(ROOT):
        try:
            yield name, (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue


def test_every_copy_of_the_address_is_the_configured_one():
    """Install lines, Colab links and Kaggle links; other links to GitHub are other projects."""
    slug = set_address.configured()
    forms = [
        (r"git\+https://github\.com/([\w-]+/[\w-]+)", slug),
        (r"colab\.research\.google\.com/github/([\w-]+/[\w-]+)", slug),
        (r"src=https%3A%2F%2Fgithub\.com%2F([\w-]+?%2F[\w-]+?)%2F", slug.replace("/", "%2F")),
    ]
    copies = [
        (name, found, wanted)
        for name, text in tracked_texts()
        if not name.startswith("tests/")
        for form, wanted in forms
        for found in re.findall(form, text)
    ]
    assert len(copies) >= 2 + len(NOTEBOOKS)
    assert [copy for copy in copies if copy[1] != copy[2]] == []


def test_no_path_of_one_machine_is_stored():
    # Split so that this file does not hold what it looks for.
    homes = "|".join(["work", "root", "tmp", r"home/\w+", r"Users/\w+"])
    path = re.compile(rf"(?<![\w.~/$)}}-])/(?:{homes})/\w")
    found = [(name, m.group(0)) for name, text in tracked_texts() for m in path.finditer(text)]
    assert found == []


def test_setting_the_address_changes_every_copy(tmp_path):
    for name, text in tracked_texts():
        if not name.startswith("memlab/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    old = set_address.configured()
    changed = set_address.rewrite("https://github.com/someone/their-fork", tmp_path)
    assert "_config.yml" in changed and len(changed) >= 1 + len(NOTEBOOKS)
    assert set_address.configured(tmp_path) == "someone/their-fork"
    left = [p.name for p in tmp_path.rglob("*") if p.is_file() and old in p.read_text()]
    assert left == []
    for notebook in tmp_path.glob("chapters/*.ipynb"):
        json.loads(notebook.read_text())
    assert set_address.rewrite("https://github.com/someone/their-fork.git", tmp_path) == []


@pytest.mark.parametrize("url", ["", "github.com/a/b", "https://github.com/a", "https://x.org/a/b"])
def test_a_wrong_address_is_refused_in_one_line(url):
    command = [sys.executable, str(ROOT / "tools" / "set_address.py"), url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert (
        len(done.stderr.strip().splitlines()) == 1
        and "https://github.com/owner/name" in done.stderr
    )
