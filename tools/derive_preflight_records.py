"""Write the records of torch-preflight's full fine-tuning on a T4.

pip download --no-deps --no-binary :all: torch-preflight==0.5.0     (MIT), and unpack it
python tools/derive_preflight_records.py torch_preflight-0.5.0/tests/calibration
"""

import json
import sys
from pathlib import Path

from memlab.evidence.records import FOLDER, Record, save

SOURCE = (
    "torch-preflight 0.5.0, tests/calibration/measured_peaks.json (https://github.com/highwaterlabs/"
    "torch-preflight)"
)
RELEASED = "2026-08-24"  # the day of the release: the runs name none
NAMES = {"bert-base-uncased": "bert-base", "distilbert-base-uncased": "distilbert"}


def record_of(run: dict) -> Record:
    config, settings = run["config"], {}
    recipe = {"model": NAMES.get(run["model"], run["model"]), "batch_size": config["batch_size"]}
    if "image_size" in config:
        settings = {"family": "images", "technique": "full", "image_size": config["image_size"]}
    else:
        recipe |= {"seq_len": config["seq_len"], "attention": "sdpa"}
    recipe |= {"precision": "bf16-amp", "optimizer": "adamw_torch"}
    size = config.get("seq_len") or config["image_size"]
    figures = {
        "peak_allocated_bytes": run["measured_allocated_bytes"],
        "peak_reserved_bytes": run["measured_reserved_bytes"],
        "device_used_bytes": run["measured_peak_bytes"],
    }
    return Record(
        "published",
        f"{recipe['model']} {config['batch_size']} x {size}",
        recipe,
        figures,
        "Tesla T4",
        None,
        {"torch": run["torch_version"]},
        RELEASED,
        SOURCE,
        "torch-preflight",
        settings,
    )


def main(folder: Path):
    runs = json.loads((folder / "measured_peaks.json").read_text(encoding="utf-8"))["runs"]
    save(FOLDER / "published-preflight-t4.json", map(record_of, runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
