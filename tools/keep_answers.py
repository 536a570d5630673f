"""Write memlab/data/answers.json: what `fits` says of what others asked in public.

    python tools/keep_answers.py

The questions are those of memlab/data/questions.json. It takes a minute; the page about them reads
the file instead. Run it after an update of torch, transformers, peft or bitsandbytes, and where a
change of memlab changes a figure.
"""

import json
from datetime import date
from pathlib import Path

from tqdm import tqdm

import memlab
from memlab import Recipe, fits
from memlab.predict.measure import versions

DATA = Path(memlab.__file__).parent / "data"


def said_of(question: dict, size: int) -> dict:
    fit = fits(Recipe(batch_size=size, **question["recipe"]), question["gpu"])
    return {
        "fits": bool(fit),
        "needed_bytes": fit.needed,
        "total_memory_bytes": fit.total_memory,
        "peak_allocated_bytes": fit.footprint.peak_allocated,
    }


def main():
    questions = json.loads((DATA / "questions.json").read_text(encoding="utf-8"))["questions"]
    answers = {}
    for question in tqdm(questions):
        sizes = question["fitted"] + question["failed"]
        answers[question["url"]] = {size: said_of(question, size) for size in sorted(sizes)}
    kept = {"date": date.today().isoformat(), "versions": versions(), "answers": answers}
    (DATA / "answers.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
