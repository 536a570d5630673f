"""Write memlab/data/accuracy.csv: each figure of each run on a GPU, recorded and predicted.

    python -m validation.accuracy [published-torchtune-a100.json ...]

The arguments are files of runs; without any, all files are done, which takes half an hour. Run it
after an update of torch, transformers, peft or bitsandbytes, and if a change of memlab changes a
figure. At the end it prints the median errors of bytes and of seconds by file, before and after.
They show whether a constant was tuned to a single GPU.

The columns of the file:

- file, run, device: the file of the run, the run's name in it, and the GPU as its driver names it.
- family: encoder, decoder, encoder-decoder or moe; technique: full, frozen, LoRA or QLoRA.
- model: a name, or a config as JSON; seq_len: tokens per sequence.
- figure: `allocated`, `active` (allocated plus blocks that another stream still uses), `reserved`,
  `device used` (reserved plus context), all in bytes, or `seconds` of a step.
- recorded, predicted: predicted is empty if there is no prediction; `refused` then says why.
- low, high: the predicted range of seconds. They are also given for the reserved bytes of some
  4-bit bases, namely those that transformers 5.0 loaded in several threads. These ranges are
  archived and not recomputed. They come from replays of each run in thirteen orders of loading: the
  order of a model that is moved, that of today's `from_pretrained`, and eleven random orders
  (`memlab.evidence.load_orders`, in releases until November 2026).
- at_release: the prediction with the library release of the run, where it differs. It is archived
  too, for two runs of PEFT's comparison, with commit 6a832dec2 of huggingface/peft.
"""

import csv
import json
import sys
import textwrap
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from memlab import Recipe, models, simulate
from memlab.evidence.records import FOLDER, Record, load
from memlab.footprint import Footprint
from memlab.gpus import gpu_of_device
from memlab.spec.recipe import QUANTIZED
from validation.loops import simulate_loop

TIMED = Path(__file__).parent / "timed"  # published runs that give seconds and no memory
FILE = FOLDER.parent / "accuracy.csv"
COLUMNS = "file run device family technique model seq_len figure recorded predicted low high"
COLUMNS = (*COLUMNS.split(), "at_release", "refused")
BYTES = {
    "allocated": "peak_allocated_bytes",
    "active": "peak_active_bytes",
    "reserved": "peak_reserved_bytes",
    "device used": "device_used_bytes",
}
FAMILIES = {"sequence-classification": "encoder", "seq2seq-lm": "encoder-decoder"}


def files() -> dict[str, Path]:
    """name -> path of each file with runs on GPUs, sorted by name."""
    found = [*FOLDER.glob("*.json"), *TIMED.glob("*.json")]
    on_cards = (path for path in found if not path.name.startswith("cpu-"))
    return {path.name: path for path in sorted(on_cards, key=lambda path: path.name)}


def kept_rows() -> dict[tuple[str, str, str], dict[str, str]]:
    """(file, run, figure) -> row of the existing accuracy.csv, with values as text."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return {(row["file"], row["run"], row["figure"]): row for row in csv.DictReader(file)}


def rows_of(file: str, run: Record) -> list[dict]:
    """One row per figure of a run; no rows for a run that was out of memory."""
    model = run.recipe["model"]
    begin = {"file": file, "run": run.name, "device": run.device, **group_of(run)}
    begin |= {"model": model if isinstance(model, str) else json.dumps(model)}
    begin |= {"seq_len": run.recipe.get("seq_len")}
    try:
        predicted = predictions(run, predict(run))
    except (ValueError, RuntimeError, ImportError) as error:
        predicted = {"refused": textwrap.shorten(str(error), 160)}
    return [
        begin | {"figure": figure, "recorded": value} | values_of(figure, predicted)
        for figure, value in recorded(run).items()
        # Seconds are left out if they cannot be estimated.
        if "refused" in predicted or figure in predicted
    ]


def values_of(figure: str, predicted: dict) -> dict:
    """The columns with the prediction of one figure, or with the reason why there is none."""
    if "refused" in predicted:
        return predicted
    if figure != "seconds":
        return {"predicted": predicted[figure]}
    return dict(zip(("low", "predicted", "high"), predicted[figure], strict=True))


def predict(run: Record) -> Footprint:
    """The predicted footprint of a run, by its own training loop or by memlab's."""
    card = gpu_of_device(run.device)
    if card is None:
        raise ValueError(f"no card of memlab is {run.device}")
    return simulate_loop(run, card) if run.loop else simulate(Recipe(**run.recipe), card)


def recorded(run: Record) -> dict[str, float]:
    """figure -> recorded value; the seconds of a step may follow from samples per second."""
    found = {figure: run.figures[name] for figure, name in BYTES.items() if name in run.figures}
    if "step_seconds" in run.figures:
        found["seconds"] = run.figures["step_seconds"]
    elif "samples_per_second" in run.figures:
        samples = run.recipe["batch_size"] * run.recipe.get("accumulation", 1)
        found["seconds"] = samples / run.figures["samples_per_second"]
    return found


def predictions(run: Record, footprint: Footprint) -> dict:
    """figure -> predicted bytes, or (low, expected, high) seconds if they can be estimated.

    A published run may bring its own context, because old drivers have other contexts than today's.
    """
    context = gpu_of_device(run.device).context
    if run.kind == "published":
        context = run.figures.get("context_bytes", context)
    found = dict.fromkeys(("allocated", "active"), footprint.peak_allocated)
    found |= {"reserved": footprint.peak_reserved}
    found |= {"device used": footprint.peak_reserved + context}
    # Seven digits: the last ones depend on the order of a sum, and so on the machine.
    if time := footprint.step_time:
        ends = time.low, time.expected, time.high
        found["seconds"] = tuple(float(f"{end:.7g}") for end in ends)
    return found


def group_of(run: Record) -> dict[str, str]:
    """Family and technique of a run: from its settings, or derived from its recipe."""
    if "technique" in run.settings:
        return {name: run.settings[name] for name in ("family", "technique")}
    recipe = Recipe(**run.recipe)
    family = FAMILIES.get(models.default_task(recipe.model), "decoder")
    technique = "LoRA" if recipe.lora_rank else "frozen" if recipe.freeze else "full"
    return {
        "family": "moe" if models.has_experts(recipe.model) else family,
        "technique": "QLoRA" if recipe.base in QUANTIZED else technique,
    }


def joined(before: dict[str, str], row: dict) -> dict:
    """A new row with the archived columns of the old one.

    These are at_release and, except for seconds, the range.
    """
    kept = ("at_release",) if row["figure"] == "seconds" else ("at_release", "low", "high")
    return {name: before.get(name) for name in kept} | row


def errors(rows: dict) -> pd.Series:
    """Median relative errors by file, separately for bytes and seconds."""
    frame = pd.DataFrame(rows.values()).replace("", None)
    frame["kind"] = frame["figure"].eq("seconds").map({True: "seconds", False: "bytes"})
    frame["error"] = frame["predicted"].astype(float) / frame["recorded"].astype(float) - 1
    return frame.groupby(["file", "kind"])["error"].median()


def main(names: list[str]) -> None:
    kept, before = kept_rows(), errors(kept_rows())
    for name, path in files().items():
        if name not in (names or [name]):
            continue
        old = {key: kept.pop(key) for key in list(kept) if key[0] == name}
        for run in tqdm(load(path), path.stem):
            for row in rows_of(name, run):
                key = name, run.name, row["figure"]
                kept[key] = joined(old.get(key, {}), row)
        write(kept)  # after each file, so that an interrupted run loses little
    table = pd.DataFrame({"before": before, "now": errors(kept)})
    print(table.to_string(float_format="{:+.2%}".format))


def write(rows: dict) -> None:
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows, key=lambda key: key[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
