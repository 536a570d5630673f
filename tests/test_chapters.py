"""The chapters as they are stored: what a reader of the source, of Colab and of a diff sees."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib

import fold_cells
import nbformat
import pytest
import set_address
import yaml
from contents import ROOT, listed_pages

import memlab
import memlab.book
import memlab.panels

CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
ADDRESS = CONFIG["repository"]["url"]
NOTEBOOKS = sorted((ROOT / "chapters").glob("*.ipynb"))
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


@each_chapter
def test_a_chapter_is_a_valid_notebook_that_begins_with_its_title_and_the_install_cell(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec["name"] == "python3"
    assert re.match(r"# \S", notebook.cells[0].source)
    code = code_cells(path)
    assert code[0].source == FIRST_CELL
    assert max(len(lines(cell)) for cell in code) <= 30
    if path.name[:2].isdigit() and "deeper" not in path.stem:
        assert any(re.search(r"\bcheck\(", cell.source) for cell in code)


def imports(path):
    """Full names of what a chapter imports, such as memlab.book.show and torch."""
    for cell in code_cells(path):
        plain = re.sub(r"^(\s*)[%!].*$", r"\1pass", cell.source, flags=re.MULTILINE)
        for node in ast.walk(ast.parse(plain)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@each_chapter
def test_the_first_cell_brings_what_the_others_import(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()  # whose cells ask whether they are here
    needed = [*project["dependencies"], *itertools.chain(*extras)]
    brought = {re.match(r"[\w-]+", line)[0] for line in needed}
    # Jupyter brings IPython, transformers its tokenizers.
    there = brought | {"memlab", "IPython", "tokenizers"} | set(sys.stdlib_module_names)
    assert {name.partition(".")[0] for name in imports(path)} <= there


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


def test_folding_follows_the_tags_and_leaves_the_rest():
    kept = {"tags": ["hide-cell"], "mystnb": {"x": 1}}
    folded = fold_cells.stamped({"metadata": kept})
    assert folded == kept | {
        "cellView": "form",
        "_kg_hide-input": True,
        "_kg_hide-output": True,
        "jupyter": {"source_hidden": True, "outputs_hidden": True},
    }
    assert fold_cells.stamped({"metadata": folded | {"tags": []}}) == kept | {"tags": []}


def test_no_function_is_written_out_in_two_chapters():
    homes = {}
    for path in NOTEBOOKS:
        for cell in code_cells(path):
            for body in re.findall(
                r"^def \w+(\(.*\n(?:    .+\n|\n(?= ))+)", f"{cell.source}\n", re.M
            ):
                if body.count("\n") > 4:
                    homes.setdefault(body, set()).add(path.stem)
    assert len(homes) > 100 and [where for where in homes.values() if len(where) > 1] == []


# Rooms behind the door that a chapter names because they are its subject.
ROOMS = {
    "01-measuring": {"memlab.trace.allocator"},
    "14-attention-deeper": {"memlab.card.kernels.sdpa"},
    "15-ablation": {"memlab.export.training_script", "memlab.predict.script"},
    "16-planner": {"memlab.export.training_script"},
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


@each_chapter
def test_a_chapter_comes_in_by_the_door_or_a_room_that_is_its_subject(path):
    doors = (memlab, memlab.book, memlab.panels)
    allowed = {f"{door.__name__}.{name}" for door in doors for name in door.__all__} | {"memlab"}
    inside = {f"{name}." for name in imports(path) if name.startswith("memlab")}
    inside -= {f"{name}." for name in allowed}
    rooms = {f"{room}." for room in ROOMS.get(path.stem, ())}
    assert {name for name in inside if not name.startswith(tuple(rooms))} == set()
    assert {room for room in rooms if not any(name.startswith(room) for name in inside)} == set()


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
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    old = set_address.configured()
    left = re.compile(old.replace("/", "(/|%2F)"))
    changed = set_address.rewrite("https://github.com/someone/their-fork", tmp_path)
    assert len(changed) >= 1 + len(NOTEBOOKS)
    assert set_address.configured(tmp_path) == "someone/their-fork"
    files = (path for path in tmp_path.rglob("*") if path.is_file())
    assert [path.name for path in files if left.search(path.read_text())] == []
    assert set_address.rewrite("https://github.com/someone/their-fork.git", tmp_path) == []


@pytest.mark.parametrize("url", ["", "github.com/a/b", "https://github.com/a", "https://x.org/a/b"])
def test_a_wrong_address_is_refused(url, tmp_path):
    with pytest.raises(ValueError, match="https://github.com/owner/name"):
        set_address.rewrite(url, tmp_path)
