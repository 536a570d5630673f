"""Write memlab/data/predictions.json: what the simulation says of every published run.

    python tools/keep_predictions.py [published-torchtune-a100.json ...]

Of the files named, or of all. It takes half an hour; the book's page on accuracy reads the file
instead. Run it after an update of torch, transformers, peft or bitsandbytes, and where a change of
memlab changes a figure. A run that cannot be simulated is kept with the reason.
"""

import json
import sys
from datetime import date

from tqdm import tqdm

from memlab import Recipe, simulate
from memlab.evidence.loops import PREDICTIONS, kept_predictions, simulate_loop
from memlab.evidence.records import FOLDER, load
from memlab.gpus import gpu_of_device
from memlab.measuring import versions


def said_of(run) -> dict:
    card = gpu_of_device(run.device)
    try:
        footprint = simulate_loop(run, card) if run.loop else simulate(Recipe(**run.recipe), card)
    except (ValueError, RuntimeError, ImportError) as error:
        return {"refused": str(error).splitlines()[0]}
    return {
        "peak_allocated_bytes": footprint.peak_allocated,
        "peak_reserved_bytes": footprint.peak_reserved,
        "reserved_range_bytes": footprint.reserved_range,
    }


def main(files):
    found = kept_predictions()["runs"] if files else {}
    for path in sorted(FOLDER.glob("published-*.json")):
        if path.name in (files or [path.name]):
            runs = tqdm(load(path), path.stem)
            found[path.name] = {run.name: said_of(run) for run in runs}
    rows = ",\n".join(f"{json.dumps(file)}: {_lines(runs)}" for file, runs in sorted(found.items()))
    about = {"date": date.today().isoformat(), "versions": versions()}
    text = f'{json.dumps(about)[:-1]}, "runs": {{\n{rows}\n}}}}\n'
    PREDICTIONS.write_text(text, encoding="utf-8")


def _lines(runs: dict) -> str:
    """A line a run."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(said)}" for name, said in runs.items())
    return f"{{\n{rows}\n}}"


if __name__ == "__main__":
    main(sys.argv[1:])
