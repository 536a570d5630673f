"""Try memlab on another Python, or with older or newer libraries than the pinned ones.

    python tools/try_versions.py --python python3.12
    python tools/try_versions.py --set lowest

It installs a set of libraries into a new virtual environment (`--into` chooses and keeps its
folder). Then it runs the tests that need no rendered book, and executes chapters 01 and 13. The
last lines of its output are a row of CONTRIBUTING.md's table. It takes half an hour and some
gigabytes.

The sets: `pinned` is requirements.txt. `lowest` and `newest` take each library of pyproject.toml in
its lowest or newest version, and `nightly` also takes unreleased versions. `colab` takes Colab's
present versions if they are new enough.

Known limitation: other people's libraries have version bounds of their own, so their training loops
(tests/strangers) are tried with the pinned set only.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ("chapters/01-measuring.ipynb", "chapters/13-lora.ipynb")
SETS = ("pinned", "lowest", "newest", "nightly", "colab")
# The output of `pip freeze` on Colab's machines, which Colab publishes.
COLAB = "https://raw.githubusercontent.com/googlecolab/backend-info/main/pip-freeze.txt"
STRANGERS = "# Other people's loops"
SHOWN = ("torch", "transformers", "datasets", "accelerate", "peft", "bitsandbytes", "numpy")


def dependencies() -> list[str]:
    """The requirements in pyproject.toml, including the book's, each with its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["book"]]


def requirements(which: str) -> list[str]:
    """The requirements for pip: the pinned tools, and memlab's own libraries as `which` says."""
    text = (ROOT / "requirements.txt").read_text()
    if which == "pinned":
        return _pins(text)
    named = {_name(line) for line in dependencies()}
    tools = _pins(text.partition(STRANGERS)[0])
    # No pins for these: the libraries that depend on them decide their versions.
    follow = {"tokenizers", "scipy"}
    own = [line.replace(">=", "==") if which == "lowest" else line for line in dependencies()]
    if which == "colab":
        with urllib.request.urlopen(COLAB) as answer:
            own = on_colab(answer.read().decode(), own)
    return own + [pin for pin in tools if _name(pin) not in named | follow]


def on_colab(freeze: str, own: list[str]) -> list[str]:
    """Each requirement pinned to the version in `freeze`, or unchanged if that is old or missing.

    Lines of `freeze` are `name==version+local` or
    `name @ https://.../name-version%2Blocal-tags.whl`.
    """
    lines = re.findall(r"^([\w.-]+)(?:==| @ \S*?-)(\d[\w.]*)", freeze, re.MULTILINE)
    there = {name.lower().replace("_", "-"): version for name, version in lines}

    def numbers(version):
        return tuple(map(int, re.findall(r"\d+", version)))

    found = []
    for line in own:
        name, _, least = line.partition(">=")
        version = there.get(name.lower().replace("_", "-"))
        new = version and numbers(version) >= numbers(least)
        found.append(f"{name}=={version}" if new else line)
    return found


def _pins(text: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the Python to try")
    parser.add_argument("--set", default="pinned", choices=SETS, help="of libraries")
    parser.add_argument("--into", help="a folder for the environment, used again if it is there")
    options = parser.parse_args()
    into = Path(options.into or tempfile.mkdtemp(prefix="versions-")).resolve()
    python, ready = into / "bin" / "python", into / "ready"
    if not ready.exists():  # as after an install that failed
        subprocess.run([options.python, "-m", "venv", into], check=True)
        pins = into / "pins.txt"
        pins.write_text("\n".join(requirements(options.set)) + "\n")
        install = [python, "-m", "pip", "install", "--quiet", "-r", pins]
        subprocess.run(install + ["--pre"] * (options.set == "nightly"), check=True)
        # memlab must be installed too: `memlab --version` reads the installed package's version.
        memlab = [python, "-m", "pip", "install", "--quiet", "--no-deps", ROOT]
        subprocess.run(memlab, check=True)
        ready.touch()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{into / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }

    def pytest(*arguments) -> str:
        """Run pytest and return the last line of its output."""
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout)
        return done.stdout.strip().splitlines()[-1].strip("= ")

    left_out = [] if options.set == "pinned" else ["--ignore=tests/strangers"]
    units = pytest("--dist", "loadfile", "-m", "not rendered and not slow", *left_out)
    chapters = pytest("--nbmake", *CHAPTERS)
    ask = f"import importlib.metadata as m; print(*(m.version(n) for n in {SHOWN!r}))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    libraries = ", ".join(f"{n} {v}" for n, v in zip(SHOWN, found.split(), strict=True))
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout
    print(f"{date.today()}: {version.strip()}, {libraries}\ntests: {units}\nchapters: {chapters}")
    return 1 if "failed" in units + chapters or "error" in units + chapters else 0


if __name__ == "__main__":
    sys.exit(main())
