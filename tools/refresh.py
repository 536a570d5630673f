"""Regenerate all files of the repository that a program makes, in the order of their dependence.

    python tools/refresh.py               everything, about three hours on two cores
    python tools/refresh.py predictions   this step and those after it; the steps are traces,
                                          predictions, answers, what-fits, cover, figures
    python tools/refresh.py --check 8     only check 8 stored traces, drawn at random

Run it after an update of torch, transformers, peft or bitsandbytes, and after a change of memlab
that changes a figure. `git diff` then shows what changed. Each change needs a reason, or it is a
mistake.
"""

import argparse
import json
import subprocess
import sys
from datetime import date
from functools import partial
from pathlib import Path

from tqdm import tqdm

import memlab
from memlab import Recipe, fits
from memlab.predict.measure import versions

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(memlab.__file__).parent / "data"


def run(*command: str) -> None:
    print(*command, flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def answers() -> None:
    """Write data/answers.json: the answers of `fits` to public questions in data/questions.json."""
    questions = json.loads((DATA / "questions.json").read_text(encoding="utf-8"))["questions"]
    found: dict[str, dict] = {}
    for question in tqdm(questions, "answers"):
        said = found[question["url"]] = {}
        for size in sorted(question["fitted"] + question["failed"]):
            fit = fits(Recipe(batch_size=size, **question["recipe"]), question["gpu"])
            said[size] = {
                "fits": fit.fits,
                "needed_bytes": fit.needed,
                "total_memory_bytes": fit.total_memory,
                "peak_allocated_bytes": fit.footprint.peak_allocated,
            }
    kept = {"date": date.today().isoformat(), "versions": versions(), "answers": found}
    (DATA / "answers.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def what_fits() -> None:
    """Regenerate tests/what_fits.json; its tool would only complete an existing file."""
    (ROOT / "tests" / "what_fits.json").unlink(missing_ok=True)
    run(sys.executable, "tools/what_fits.py")


# Step -> the function that regenerates its files. Each step may read the files of earlier ones.
STEPS = {
    "traces": partial(run, sys.executable, "tools/record_traces.py"),
    "predictions": partial(run, sys.executable, "-m", "validation.accuracy"),
    "answers": answers,
    "what-fits": what_fits,
    "cover": partial(run, sys.executable, "tools/draw_cover.py"),
    "figures": partial(run, "make", "figures"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", nargs="?", default="traces", choices=STEPS, help="the first step")
    parser.add_argument("--check", type=int, metavar="N", help="N kept traces, and make nothing")
    asked = parser.parse_args()
    if asked.check:
        run(sys.executable, "tools/record_traces.py", "--check", str(asked.check))
        return
    for name in list(STEPS)[list(STEPS).index(asked.first) :]:
        STEPS[name]()


if __name__ == "__main__":
    main()
