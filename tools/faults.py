"""Put single faults into a copy of the tree and ask whether the tests notice them.

    python tools/faults.py --count 60 --seed 1
    python tools/faults.py --list            # the faults, without a run

Faults are drawn by the seed from every room of the package (a comparison or a sign turned, a
number changed, a branch negated, a returned value dropped), from the data tables (a number
changed) and from the chapters (a gain's sign turned). Each is put alone into a copy of what git
tracks, and the tests run that should catch it: those that bear the module's name, or else those
that name it and those of the modules that import it. A chapter's run is its tests and the page
itself, whose figures and verdicts are compared with the text.
A fault is killed if one of them fails that passes without it. The last line is the share.

mutmut 3.8 and cosmic-ray 8.7 were looked at and not taken: they change Python alone, and a third
of the faults here is in JSON and in notebooks; mutmut runs the whole suite first to learn which
test reaches what, and cosmic-ray runs one command, the whole suite, for each fault.
"""

import argparse
import ast
import copy
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "_ext"), str(ROOT / "tools")]
import figures  # noqa: E402
from book_extras import turned_shares  # noqa: E402

TABLES = ("gpus", "models", "links")  # facts of others; what memlab keeps is made by its tools
PAIRS = "Lt LtE  Gt GtE  Eq NotEq  In NotIn  Is IsNot  Add Sub  Mult Div"
TURNED = {
    getattr(ast, a): getattr(ast, b)
    for pair in PAIRS.split("  ")
    for a, b in (pair.split(), reversed(pair.split()))
}
HINTS = {"annotation", "returns"}  # fields of the tree that nothing computes


@dataclass(frozen=True)
class Fault:
    """One change: path below the root, line, kind, what stood there and what stands, the text.

    In a notebook `cell` is the id of the changed one and `line` counts within it.
    """

    path: str
    line: int
    kind: str
    before: str
    after: str
    text: str
    cell: str = ""

    def __str__(self) -> str:
        place = ":".join(filter(None, (self.path, self.cell, str(self.line))))
        before, after = (textwrap.shorten(text, 60) for text in (self.before, self.after))
        return f"{self.kind:10} {place}  {before} -> {after}"


def changes(tree: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """(kind, node, what replaces it) of every fault that Python code can have."""
    for name, value in ast.iter_fields(tree):
        if name not in HINTS:
            for node in value if isinstance(value, list) else [value]:
                if isinstance(node, ast.AST):
                    yield from changes(node)
    match tree:
        case ast.Compare(ops=[op]) if other := TURNED.get(type(op)):
            yield "comparison", tree, ast.Compare(tree.left, [other()], tree.comparators)
        case ast.BinOp(op=op) if other := TURNED.get(type(op)):
            yield "sign", tree, ast.BinOp(tree.left, other(), tree.right)
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(n)):
            yield "off by one", tree, ast.Constant(n + 1)
        case ast.Constant(value=float(n)):
            yield "constant", tree, ast.Constant(2 * n or 1.0)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "branch", test, ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", value, ast.Constant(None)


def gains(tree: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """(kind, node, what replaces it) of `1 - a / b` and `a / b - 1`."""
    named = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    sizes = [argument for call in named if call.func.id == "abs" for argument in call.args]
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(a, ast.Sub(), b) if node not in sizes and any(
                ast.unparse(x) == "1" and isinstance(getattr(y, "op", None), ast.Div)
                for x, y in ((a, b), (b, a))
            ):
                yield "gain", node, ast.BinOp(b, ast.Sub(), a)


def edits(source: str, found=changes) -> Iterator[tuple[int, str, str, str, str]]:
    """(line, kind, before, after, the whole text) of every fault in a piece of Python.

    Positions inside f-strings are not all true before Python 3.12: those that are not are left.
    """
    starts, encoded = [0], source.encode()
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for kind, node, other in found(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before, after = encoded[begin:end].decode(errors="replace"), f"({ast.unparse(other)})"
        try:
            true = ast.dump(ast.parse(f"({before})", mode="eval").body) == ast.dump(node)
        except SyntaxError:
            continue
        if true:
            text = encoded[:begin] + after.encode() + encoded[end:]
            yield node.lineno, kind, before, after, text.decode()


def in_code(path: str) -> Iterator[Fault]:
    for line, *rest in edits((ROOT / path).read_text(encoding="utf-8")):
        yield Fault(path, line, *rest)


def in_table(path: str) -> Iterator[Fault]:
    """Every number of a JSON file, a tenth more or the next whole one."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?', text):
        old = found[0]
        if not old.startswith('"'):
            whole = old.lstrip("-").isdigit()
            new = str(int(old) + max(1, int(old) // 10)) if whole else f"{float(old) * 1.1:g}"
            line = text.count("\n", 0, found.start()) + 1
            changed = text[: found.start()] + new + text[found.end() :]
            yield Fault(path, line, "number", old, new, changed)


def in_chapter(path: str) -> Iterator[Fault]:
    notebook = json.loads((ROOT / path).read_text(encoding="utf-8"))
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or re.search(r"^\s*[%!]", source, re.MULTILINE):
            continue
        for line, kind, before, after, text in edits(source, gains):
            changed = copy.deepcopy(notebook)
            changed["cells"][number]["source"] = text.splitlines(keepends=True)
            yield Fault(path, line, kind, before, after, json.dumps(changed), cell["id"])


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def drawn(count: int, seed: int) -> list[Fault]:
    """So many faults by chance: 70 % of code, 10 % of tables, 20 % of chapters.

    Rooms of the package take turns, and so do tables.
    """
    draw, files, chosen = random.Random(seed), tracked(), []
    modules = [p for p in files if re.fullmatch(r"memlab/.*\w\.py", p) and "__" not in p]
    code = [one for p in modules for one in in_code(p)]
    data = [one for name in TABLES for one in in_table(f"memlab/data/{name}.json")]
    pages = [one for p in files if re.match(r"chapters/\d.*ipynb", p) for one in in_chapter(p)]
    for share, found, place in (
        (0.7, code, lambda one: str(Path(one.path).parent)),
        (0.1, data, lambda one: one.path),
        (0.2, pages, lambda one: one.kind),
    ):
        groups = {}
        for one in found:
            groups.setdefault(place(one), []).append(one)
        for name in sorted(groups):
            draw.shuffle(groups[name])
        turns = itertools.zip_longest(*(groups[name] for name in sorted(groups)))
        chosen += [one for turn in turns for one in turn if one][: round(count * share)]
    return chosen


def tests_of(path: str) -> list[str]:
    """The test files that should notice a fault in a file, the nearest first."""
    tests = {p: (ROOT / p).read_text(encoding="utf-8") for p in tracked() if "/test_" in p}
    stem, room = Path(path).stem, Path(path).parent.name
    if path.endswith(".ipynb"):
        subject = re.sub(r"^\d+-|-deeper$", "", stem)
        return [p for p in tests if p == f"tests/chapters/test_{subject}.py"]
    near = "tests" if room in ("memlab", "data") else room
    own = [p for p in tests if Path(p).name == f"test_{stem}.py" and Path(p).parent.name == near]
    modules = {p: (ROOT / p).read_text() for p in tracked() if re.match(r"memlab/.*\.py", p)}
    said = _naming(path)
    naming = [p for p, text in tests.items() if said.search(text)]
    users = [Path(p) for p, text in modules.items() if said.search(text) and p != path]
    names = {p.parent.name if p.stem == "__init__" else p.stem for p in users}
    by_users = [p for p in tests if Path(p).stem.removeprefix("test_") in names]
    found = own or list(dict.fromkeys(naming + by_users))
    # A module that is loaded by its name has the tests of its package.
    found = found or [p for p in tests if Path(p).stem == f"test_{room}"]
    return found or [p for p in tests if Path(p).parent.name == near]


def _naming(path: str) -> re.Pattern:
    """What a file says that imports a module, or reads a table."""
    if path.endswith(".json"):
        return re.compile(rf"\b{re.escape(Path(path).name)}\b")
    module = path.removesuffix(".py").replace("/", ".")
    room, _, name = module.rpartition(".")
    line = rf"from {re.escape(room)} import (?:[^\n]*|\([^)]*)\b{name}\b"
    return re.compile(rf"\b{re.escape(module)}\b|{line}")


def printed(notebook: Path) -> str:
    """What the cells of an executed notebook print and say."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    said = [one.get("text") or one.get("data", {}).get("text/markdown", "") for one in outputs]
    return "\n".join(map("".join, said))


class Tree:
    """A copy of what git tracks, with one fault at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in tracked():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)

    def pytest(self, *arguments: str, seconds: float) -> tuple[int, str]:
        """(status, what was printed) of pytest in the copy; the status is 124 beyond the time."""
        command = ["timeout", f"{seconds:.0f}", sys.executable, "-m", "pytest", "-x", "-q"]
        quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        here = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *arguments], cwd=self.folder, text=True,
            env=os.environ | quiet | here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout

    def noticed(self, page: str, tests: list[str], seconds: float) -> str:
        """What fails in the copy as it stands, a page's line or a test's name; "" for nothing."""
        if page:
            file = self.folder / page
            figures.store(file, figures.with_figures(figures.read(file)))
            status, _ = self.pytest("--nbmake", "--overwrite", page, seconds=seconds)
            lines = figures.differences(*figures.without_figures(figures.read(file)))
            lines += turned_shares(printed(file))
            if status or lines:
                return page if status else " ".join(lines)
        for which in ("not slow and not rendered", "slow and not rendered") if tests else ():
            status, said = self.pytest(*tests, "-m", which, seconds=seconds)
            if status == 124:
                return f"no end in {seconds:.0f} s"
            if status not in (0, 5):  # 5: there is no such test
                failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
                return failed[1] if failed else "pytest"
        return ""

    def judge(self, fault: Fault, seconds: float) -> str:
        """The name of what kills a fault and passes without it; "" if it survives."""
        target, tests = self.folder / fault.path, tests_of(fault.path)
        whole = target.read_text(encoding="utf-8")

        def run(text, names, page):
            target.write_text(text, encoding="utf-8")
            killer = self.noticed(page, names, seconds)
            target.write_text(whole, encoding="utf-8")
            return killer

        page = fault.path if fault.cell else ""
        killer = run(fault.text, tests, page)
        again = ([killer], "") if "::" in killer else ([] if page else tests, page)
        return killer if killer and run(whole, *again) != killer else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="how many faults")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of a fault")
    parser.add_argument("--only", default="", help="only faults whose line holds this text")
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    given = parser.parse_args()
    faults = [f for f in drawn(given.count, given.seed) if given.only in str(f)]
    if given.list:
        return print(*faults, sep="\n") or 0
    killed = Counter()
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        for fault in faults:
            killer = tree.judge(fault, given.limit)
            print(f"{'killed  ' if killer else 'SURVIVED'} {fault}  {killer}", flush=True)
            killed[fault.kind] += bool(killer)
    for kind, count in Counter(fault.kind for fault in faults).items():
        print(f"{kind:10} {killed[kind]} of {count} killed")
    print(f"{killed.total()} of {len(faults)} killed: {killed.total() / len(faults):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
