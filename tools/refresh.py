"""Make everything anew that a program makes and the repository keeps, each after what it needs.

    python tools/refresh.py             all of it, some three hours on two cores
    python tools/refresh.py predictions from there on

Run it after an update of torch, transformers, peft or bitsandbytes, and after a change of memlab
that changes a figure. What it changed `git diff` says; each change has a reason, or is a mistake.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What is kept -> the command that makes it, from traces to the figures in sentences.
STEPS = {
    "traces": ["tools/record_traces.py"],
    "predictions": ["tools/keep_predictions.py"],
    "answers": ["tools/keep_answers.py"],
    "what-fits": ["tools/what_fits.py"],
    "cover": ["tools/draw_cover.py"],
    "figures": ["make", "figures"],
}


def main(first: str) -> None:
    if first not in STEPS:
        sys.exit(f"step is {first}: allowed are {', '.join(STEPS)}")
    for name in list(STEPS)[list(STEPS).index(first) :]:
        command = STEPS[name]
        command = command if command[0] == "make" else [sys.executable, *command]
        print(f"{name}: {' '.join(command)}", flush=True)
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["traces"])
