"""Try memlab on another Python, or with the oldest libraries that pyproject.toml allows.

    python tools/try_versions.py --python python3.12
    python tools/try_versions.py --lowest

makes an environment in a new folder (--into keeps it), installs the set of requirements.txt, or
with --lowest each library of pyproject.toml in its lowest version, runs the tests that need no
rendered book, and executes chapters 01 and 13. The last lines are what the README's table holds.
Other people's libraries have lower bounds of their own, so with --lowest their loops
(tests/strangers) stay out. It takes half an hour and some gigabytes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ("chapters/01-measuring.ipynb", "chapters/13-lora.ipynb")
STRANGERS = "# Other people's loops"
SHOWN = ("torch", "transformers", "datasets", "accelerate", "peft", "bitsandbytes", "numpy")


def lowest() -> list[str]:
    """Pins of the lowest versions that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line.replace(">=", "==") for line in project["dependencies"]]


def requirements(low: bool) -> list[str]:
    """What pip gets: the pins of requirements.txt, those of pyproject.toml's lowest instead."""
    text = (ROOT / "requirements.txt").read_text()
    if not low:
        return _pins(text)
    named = {_name(line) for line in lowest()}
    tools = _pins(text.partition(STRANGERS)[0])
    # tokenizers and scipy follow from what they serve.
    follow = {"tokenizers", "scipy"}
    return lowest() + [pin for pin in tools if _name(pin) not in named | follow]


def _pins(text: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the Python to try")
    parser.add_argument("--lowest", action="store_true", help="the oldest libraries allowed")
    parser.add_argument("--into", help="a folder for the environment, used again if it is there")
    options = parser.parse_args()
    into = Path(options.into or tempfile.mkdtemp(prefix="versions-")).resolve()
    python = into / "bin" / "python"
    if not python.exists():
        subprocess.run([options.python, "-m", "venv", into], check=True)
        pins = into / "pins.txt"
        pins.write_text("\n".join(requirements(options.lowest)) + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", pins], check=True)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{into / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }

    def pytest(*arguments) -> str:
        """The last line that pytest says."""
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout)
        return done.stdout.strip().splitlines()[-1].strip("= ")

    left_out = ["--ignore=tests/strangers"] if options.lowest else []
    units = pytest("--dist", "loadfile", "-m", "not rendered", *left_out)
    chapters = pytest("--nbmake", *CHAPTERS)
    ask = f"import importlib.metadata as m; print(*(m.version(n) for n in {SHOWN!r}))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    libraries = ", ".join(f"{n} {v}" for n, v in zip(SHOWN, found.split(), strict=True))
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout
    print(f"{date.today()}: {version.strip()}, {libraries}\ntests: {units}\nchapters: {chapters}")
    return 1 if "failed" in units + chapters or "error" in units + chapters else 0


if __name__ == "__main__":
    sys.exit(main())
