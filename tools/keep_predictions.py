"""Write memlab/data/predictions.json: what the simulation says of every run on a card, published or
recorded.

    python tools/keep_predictions.py [published-torchtune-a100.json ...]

Of the files named, or of all. It takes a quarter of an hour; the book's page on accuracy reads the
file instead. Run it after an update of torch, transformers, peft or bitsandbytes, and where a
change of memlab changes a figure. A run that cannot be simulated is kept with the reason. At the
end it prints each source's errors of bytes and of seconds before and after, so that no constant is
changed for the sake of one card.

    PYTHONPATH=older-peft/src python tools/keep_predictions.py --release published-peft-l40s.json

adds what is said with a library's release of the runs in place of today's, where that differs:
`of_release`. Of PEFT's comparison it is commit 6a832dec2 of huggingface/peft.
"""

import json
import statistics
import sys
import textwrap
from datetime import date

from tqdm import tqdm

from memlab import Recipe, simulate
from memlab.evidence.accuracy import compare_kept
from memlab.evidence.loops import PREDICTIONS, kept_predictions, simulate_loop
from memlab.evidence.records import card_files, load
from memlab.gpus import gpu_of_device
from memlab.predict.measure import versions


def said_of(run) -> dict:
    card = gpu_of_device(run.device)
    try:
        footprint = simulate_loop(run, card) if run.loop else simulate(Recipe(**run.recipe), card)
    except (ValueError, RuntimeError, ImportError) as error:
        return {"refused": textwrap.shorten(str(error), 160)}
    seconds = footprint.step_time
    return {
        "peak_allocated_bytes": footprint.peak_allocated,
        "peak_reserved_bytes": footprint.peak_reserved,
        "reserved_range_bytes": footprint.reserved_range,
        "step_seconds": seconds and [seconds.low, seconds.expected, seconds.high],
    }


def main(files, release=False):
    kept = kept_predictions()
    found, about = kept.pop("runs"), kept
    if not (release or files):  # else most are still of the releases before
        about = {"date": date.today().isoformat(), "versions": versions()}
    chosen = {n: path for n, path in card_files().items() if n in (files or [n])}
    before = {name: errors(name) for name in chosen if name in found}
    for name, path in chosen.items():
        said = found.setdefault(name, {})
        for run in tqdm(load(path), path.stem):
            said[run.name] = _joined(said.get(run.name, {}), said_of(run), release)
            write(about, found)  # what is finished is kept, whatever comes
    for name in chosen:
        print(f"{name}: {before.get(name, 'new')} -> {errors(name)}")


def errors(file: str) -> str:
    """Median errors of what is kept of a file's runs, of bytes and of seconds."""
    words = []
    for kind, timed in (("bytes", False), ("seconds", True)):
        rows = [one for one in compare_kept(file) if (one.figure == "seconds") == timed]
        found = [one.error for one in rows if one.error is not None]
        if found:
            median, size = statistics.median(found), statistics.median(map(abs, found))
            words.append(f"{len(found)} {kind} {median:+.1%} (size {size:.1%})")
    return ", ".join(words)


def write(about: dict, found: dict):
    rows = ",\n".join(f"{json.dumps(file)}: {_lines(found[file])}" for file in sorted(found))
    text = f'{json.dumps(about)[:-1]}, "runs": {{\n{rows}\n}}}}\n'
    PREDICTIONS.write_text(text, encoding="utf-8")


def _joined(before: dict, said: dict, release: bool) -> dict:
    """What is kept of a run, once it was simulated anew with today's libraries or a release."""
    today = {k: v for k, v in before.items() if k != "of_release"} if release else said
    of_release = said if release else before.get("of_release", today)
    return today if of_release == today else today | {"of_release": of_release}


def _lines(runs: dict) -> str:
    """A line a run."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(said)}" for name, said in runs.items())
    return f"{{\n{rows}\n}}"


if __name__ == "__main__":
    named = sys.argv[1:]
    main([name for name in named if name != "--release"], "--release" in named)
