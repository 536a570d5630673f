"""Write the records of PEFT's method comparison, Llama-3.2-3B on MetaMathQA, on an L40S.

git clone https://github.com/huggingface/peft                          (Apache-2.0)
python tools/derive_peft_records.py peft/method_comparison/MetaMathQA/results
"""

import json
import sys
from pathlib import Path

from memlab.evidence.records import FOLDER, Record, save
from memlab.units import MiB

SOURCE = (
    "huggingface/peft, method_comparison/MetaMathQA/results at 5d602fdbf (https://github.com/"
    "huggingface/peft)"
)
LONGEST = 698  # tokens: memlab/evidence/loops/peft_comparison.py
KEPT_BY_THEIR_CHECK = 2 * MiB  # reserved before they begin to count, and taken off their figure
# What of a TrainConfig changes memory and no recipe says; the rest is alike in all runs.
TRAINING = ("autocast_adapter_dtype", "optimizer_type", "optimizer_kwargs")
# Of an adapter's config, what is no setting: names of files and releases.
NAMES = ("peft_version", "base_model_name_or_path", "inference_mode")
LIBRARIES = ("torch", "transformers", "peft")


def record_of(name: str, run: dict) -> Record:
    about, told = run["run_info"], run["run_info"]["train_config"]
    unlike = {"dtype": "bfloat16", "compile": False, "use_gc": False, "use_amp": False}
    assert told["model_id"] == "meta-llama/Llama-3.2-3B"
    assert all(told[field] == value for field, value in unlike.items()), name
    recipe = {"model": "llama-3.2-3b", "batch_size": told["batch_size"], "seq_len": LONGEST}
    recipe |= {"precision": "bf16", "attention": "sdpa", "padded": True}
    recipe |= {"max_grad_norm": told["grad_norm_clip"]}
    adapter = about["peft_config"] and {
        field: value
        for field, value in about["peft_config"].items()
        if value not in (None, {}, []) and field not in NAMES
    }
    if adapter and adapter["peft_type"] == "ADALORA":
        del adapter["rank_pattern"]  # which ranks the run has kept in the end
    technique = "other adapters" if adapter else "full"
    technique = "LoRA" if name.startswith("lora--") else technique
    settings = {"family": "decoder", "technique": technique, "adapter": adapter}
    settings["training"] = {field: told[field] for field in TRAINING}
    peak = run["train_info"]["accelerator_memory_max"] + KEPT_BY_THEIR_CHECK
    packages = run["meta_info"]["package_info"]
    versions = {library: packages[f"{library}-version"] for library in LIBRARIES}
    device = run["meta_info"]["system_info"]["accelerator"]
    seconds, tokens = seconds_and_tokens(run["train_info"]["metrics"], told["eval_steps"])
    settings["tokens_of_sequence"] = round(tokens / told["batch_size"])
    return Record(
        "published",
        name.replace("--llama-3.2-3B-", " "),
        recipe,
        {
            "peak_reserved_bytes": peak,
            "samples_per_second": round(told["batch_size"] / seconds, 4),
        },
        device,
        None,
        versions,
        about["created_at"][:10],
        SOURCE,
        "PEFT's comparison",
        settings,
    )


def seconds_and_tokens(metrics: list[dict], steps: int) -> tuple[float, float]:
    """Of the mean step: its seconds, and its tokens with an end of sequence for each text.

    metrics: of every so many steps, their seconds and their tokens a second.
    """
    trained = [one for one in metrics if "tokens / sec" in one]
    seconds = sum(one["train time"] for one in trained)
    tokens = sum(one["train time"] * one["tokens / sec"] for one in trained)
    return seconds / (steps * len(trained)), tokens / (steps * len(trained))


def main(folder: Path):
    found = []
    for path in sorted(folder.glob("*.json")):
        found.append(record_of(path.stem, json.loads(path.read_text(encoding="utf-8"))))
    save(FOLDER / "published-peft-l40s.json", found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
