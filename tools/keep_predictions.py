"""Write memlab/data/predictions.json: what the simulation says of every published run.

    python tools/keep_predictions.py

It takes minutes; the book's page on accuracy reads the file instead. Run it after an update of
torch, transformers, peft or bitsandbytes, and where a change of memlab changes a figure.
"""

import json
from datetime import date

from tqdm import tqdm

from memlab import Recipe, simulate
from memlab.evidence.loops import PREDICTIONS, simulate_loop
from memlab.evidence.records import FOLDER, load
from memlab.gpus import gpu_of_device
from memlab.measuring import versions


def said_of(run) -> dict:
    recipe, card = Recipe(**run.recipe), gpu_of_device(run.device)
    footprint = simulate_loop(run.loop, recipe, card) if run.loop else simulate(recipe, card)
    return {
        "peak_allocated_bytes": footprint.peak_allocated,
        "peak_reserved_bytes": footprint.peak_reserved,
        "reserved_range_bytes": footprint.reserved_range,
    }


def main():
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        runs = [run for run in load(path) if run.kind == "published"]
        if runs:
            found[path.name] = {run.name: said_of(run) for run in tqdm(runs, path.stem)}
    rows = ",\n".join(f"{json.dumps(file)}: {_lines(runs)}" for file, runs in found.items())
    about = {"date": date.today().isoformat(), "versions": versions()}
    text = f'{json.dumps(about)[:-1]}, "runs": {{\n{rows}\n}}}}\n'
    PREDICTIONS.write_text(text, encoding="utf-8")


def _lines(runs: dict) -> str:
    """A line a run."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(said)}" for name, said in runs.items())
    return f"{{\n{rows}\n}}"


if __name__ == "__main__":
    main()
