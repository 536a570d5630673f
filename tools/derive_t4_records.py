"""Write the records of 61 LoRA trainings on a T4 from the measurements that fitcheck publishes.

    pip download --no-deps --no-binary :all: fitcheck-llm==0.3.1     (MIT), and unpack it
    python tools/derive_t4_records.py fitcheck_llm-0.3.1/data/measurements

Taken are the runs that name their model's dimensions, without repetitions of the same run.
"""

import json
import sys
from pathlib import Path

from memlab.evidence.records import FOLDER, Record, save
from memlab.units import MiB

SOURCE = "fitcheck-llm 0.3.1, data/measurements (https://github.com/Anassbzdd/fitcheck)"
NAMES = {"num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads"}


def config_of(model: str, dimensions: dict) -> dict:
    """The values of a config.json: the dimensions measured with, and what those leave open."""
    family = next((f for f in ("qwen2", "mistral") if f in model.lower()), "llama")
    config = {"model_type": family}
    config |= {NAMES.get(k, k): v for k, v in dimensions.items() if k not in ("name", "num_params")}
    if family == "mistral":
        config["sliding_window"] = None  # as in the models from version 0.2 on
    if "SmolLM2" in model:
        config["max_position_embeddings"] = 8192  # as published; the default is below 4,096
    return config


def record_of(row: dict, session: dict) -> Record:
    run, measured, date = row["run"], row["measured"], session["measured_on"]
    same = ("batch_size", "seq_len", "lora_rank", "lora_targets")
    recipe = {"model": config_of(row["model_id"], row["model_config"])}
    recipe |= {field: run[field] for field in same}
    recipe |= {"attention": run["attn_impl"], "base": run["quantization"]}
    dtype = "precision" if run["quantization"] == "none" else "compute_dtype"
    recipe |= {"checkpointing": "non-reentrant", dtype: "fp16"}
    peaks = {k: round(measured[f"{k}_mib"] * MiB) for k in ("peak_allocated", "peak_reserved")}
    figures = {f"{name}_bytes": nbytes for name, nbytes in peaks.items()}
    figures["step_seconds"] = round(measured["step_seconds"], 4)
    base = run["quantization"].replace("none", "fp16")
    size = f"{run['batch_size']}x{run['seq_len']} r{run['lora_rank']}"
    name = f"{row['model_id']} {base} {run['attn_impl']} {size} {date}"
    packages = ("torch", "transformers", "peft", "bitsandbytes")
    versions = {package: session[package] for package in packages if session[package]}
    where = session["gpu_name"], None, versions, date
    return Record("published", name, recipe, figures, *where, SOURCE, loop="fitcheck")


def main(folder: Path):
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf8"))
    found = {}
    for entry in manifest["rows"]:
        rows = json.loads((folder / entry["file"]).read_text(encoding="utf8"))["runs"]
        row = rows[entry["index"]]
        if "model_config" in row:
            record = record_of(row, manifest["sessions"][entry["session"]])
            found.setdefault(record.name, record)
    save(FOLDER / "published-fitcheck-t4.json", found.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
