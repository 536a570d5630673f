"""Real LoRA trainings on a T4, measured by the authors of fitcheck-llm, run on the simulated card.

    python benchmarks/t4.py           simulates the runs of memlab/data/t4.json and compares
    python benchmarks/t4.py FOLDER    takes the measurements from there, which is data/measurements
                                      of fitcheck-llm's source distribution (0.3.1, MIT), and
                                      writes them to that file with what is simulated

Their loop is rebuilt here from its description: a decoder in fp16 or NF4, adapters on q, k, v and
o, AdamW, non-reentrant checkpointing, one batch of random ids, `out` alive until the step ends;
with sdpa the memory-efficient kernel alone, and keys repeated by hand, as it takes no shared ones.
An NF4 base comes to the card weight by weight; theirs came through `from_pretrained`.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from datetime import date
from pathlib import Path
from unittest import mock

import peft
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm.auto import tqdm
from transformers import AutoConfig

from memlab import Recipe, SimulatedGPU, models
from memlab.measuring import versions
from memlab.quantized import quantize_base

FILE = Path(models.__file__).parent / "data" / "t4.json"
MiB = 2**20
SOURCE = "fitcheck-llm 0.3.1, data/measurements (https://github.com/Anassbzdd/fitcheck)"
DIMENSIONS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tie_word_embeddings",
}


def measured_runs(folder: Path) -> list[dict]:
    """The archived runs that name their model's dimensions, without repetitions of the same run."""
    found = {}
    for path in sorted(folder.glob("*t4-*.json")):
        for row in json.loads(path.read_text(encoding="utf8")).get("runs", []):
            if "model_config" not in row:
                continue
            run, values = row["run"], row["model_config"]
            name = row["model_id"]
            family = next((f for f in ("qwen2", "mistral") if f in name.lower()), "llama")
            one = {
                "model": name,
                "model_type": family,
                "config": {ours: values[theirs] for theirs, ours in DIMENSIONS.items()},
                "attention": run["attn_impl"],
                "base": run["quantization"],
                "batch_size": run["batch_size"],
                "seq_len": run["seq_len"],
                "lora_rank": run["lora_rank"],
                "measured_on": path.stem,
                "measured": {
                    f"peak_{kind}": round(row["measured"][f"peak_{kind}_mib"] * MiB)
                    for kind in ("allocated", "reserved")
                },
            }
            if family == "mistral":
                one["config"]["sliding_window"] = None  # as in the models from version 0.2 on
            key = (path.stem, name, *(one[k] for k in ("attention", "base", "batch_size")))
            found.setdefault((*key, one["seq_len"]), one)
    return list(found.values())


@contextlib.contextmanager
def efficient_kernel():
    """The memory-efficient kernel and no other, with the keys repeated by hand."""
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, *args, enable_gqa=False, **kwargs):
        groups = query.size(-3) // key.size(-3)
        if groups > 1:
            key, value = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
        return original(query, key, value, *args, **kwargs)

    patched = mock.patch.object(torch.nn.functional, original.__name__, attention)
    with patched, sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        yield


def simulated(run: dict) -> dict[str, int]:
    """Peak allocated and reserved, in bytes, of the second step of a run."""
    config = AutoConfig.for_model(run["model_type"], **run["config"])
    with SimulatedGPU("T4") as gpu:
        with gpu.tracer.unseen():  # made on the host
            model = models.build(config, dtype=torch.float16, attention=run["attention"])
            if run["base"] != "none":
                base = dict(base=run["base"], compute_dtype="fp16")
                quantize_base(model, Recipe(config, lora_rank=run["lora_rank"], **base))
        with gpu.tracer.loading():
            model.to("cuda")
        if run["base"] != "none":
            model = peft.prepare_model_for_kbit_training(model)
        rank, targets = run["lora_rank"], ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=targets))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        batch = torch.randint(0, 100, (run["batch_size"], run["seq_len"]), device="cuda")

        def step():
            optimizer.zero_grad()
            out = model(input_ids=batch, labels=batch)
            out.loss.backward()
            optimizer.step()

        with efficient_kernel() if run["attention"] == "sdpa" else contextlib.nullcontext():
            step()
            gpu.reset_peak()
            step()
        footprint = gpu.footprint
    return {
        "peak_allocated": footprint.peak_allocated,
        "peak_reserved": footprint.peak_reserved,
    }


def errors(runs: list[dict], kind: str) -> list[float]:
    return [run["simulated"][kind] / run["measured"][kind] - 1 for run in runs]


def main():
    if len(sys.argv) > 1:
        runs = measured_runs(Path(sys.argv[1]))
    else:
        runs = json.loads(FILE.read_text(encoding="utf8"))["runs"]
    for run in tqdm(runs):
        run["simulated"] = simulated(run)
    if len(sys.argv) > 1:
        rows = ",\n".join(json.dumps(run) for run in runs)
        about = {"source": SOURCE, "versions": versions(), "date": date.today().isoformat()}
        text = f'{{"about": {json.dumps(about)}, "runs": [\n{rows}\n]}}\n'
        FILE.write_text(text, encoding="utf8")
    for base, attention in sorted({(run["base"], run["attention"]) for run in runs}):
        some = [r for r in runs if (r["base"], r["attention"]) == (base, attention)]
        print(f"base {base}, {attention}: {len(some)} runs")
        for kind in ("peak_allocated", "peak_reserved"):
            found = errors(some, kind)
            middle, worst = statistics.median(map(abs, found)), max(found, key=abs)
            print(f"  {kind}: median {middle:.4%}, worst {worst:+.4%}")


if __name__ == "__main__":
    main()
