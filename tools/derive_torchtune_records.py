"""Write the records of torchtune's ladder of memory techniques on an A100.

    git clone https://github.com/pytorch/torchtune                       (BSD-3-Clause)
    git -C torchtune show 1814feb17:README.md > README-1814feb17.md
    python tools/derive_torchtune_records.py README-1814feb17.md

The rows that are left out, and why, are named in memlab/evidence/loops/torchtune.py.
"""

import re
import sys
from pathlib import Path

from memlab.evidence.records import FOLDER, Record, save

SOURCE = "torchtune, README.md of 2024-11-18 at 1814feb17 (https://github.com/pytorch/torchtune)"
# row of the README -> changes of recipe and settings, each on top of those before it
LADDER = {
    "+ Packed Dataset": {},
    "+ Activation Checkpointing": {"checkpointing": "non-reentrant", "chunked_loss": True},
    "+ Fuse optimizer step into backward": {"step_in_backward": True},
    "+ Activation Offloading": {"offloading": True},
    "+ 8-bit AdamW": {"optimizer": "adamw_8bit"},
    "LoRA": {"lora_rank": 64, "optimizer": "adamw_torch_fused", "step_in_backward": False},
}
SETTINGS = ("chunked_loss", "step_in_backward", "offloading")
RECIPE = {"model": "llama-3.2-3b", "batch_size": 2, "seq_len": 4096, "precision": "bf16"}
RECIPE |= {"attention": "sdpa", "optimizer": "adamw_torch_fused"}


def main(readme: Path):
    row = re.compile(r"^\| \[?([^|\]]+?)(?:\]\([^)]*\))? \| ([\d.]+) \| ", re.MULTILINE)
    published, told, records = dict(row.findall(readme.read_text())), {}, []
    for name, changes in LADDER.items():
        told |= changes
        settings = {key: value for key, value in told.items() if key in SETTINGS and value}
        recipe = RECIPE | {key: value for key, value in told.items() if key not in SETTINGS}
        figures = {"peak_active_bytes": round(float(published[name]) * 2**30)}
        about = "NVIDIA A100-SXM4-80GB", None, {}, "2024-11-18", SOURCE, "torchtune", settings
        records.append(Record("published", name, recipe, figures, *about))
    save(FOLDER / "published-torchtune-a100.json", records)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
