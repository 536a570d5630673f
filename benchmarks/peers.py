"""Compare memlab's predictions for the recorded runs with those of other programs, in one table.

    pip install fitcheck-llm torch-preflight     (accelerate is one of the book's own packages)
    python benchmarks/peers.py [record files]

Each program is called through its own interface, with the recipe translated into its terms. A
recipe that it cannot express counts as a refusal, not as an error. Some programs would silently
answer another question; then this file refuses for them. A program that is not installed is named
and left out. All figures are the memory in use on the device, context included.
"""

from __future__ import annotations

import collections
import importlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from tqdm.auto import tqdm

from memlab import Recipe, models, simulate
from memlab.evidence.records import find_records, load
from memlab.gpus import gpu_of_device

MiB = 2**20


class Refused(Exception):
    """A program cannot express a recipe."""


def memlab(recipe, run, card):
    """memlab: `simulate`, plus the context published with the run, or else the GPU's."""
    return simulate(recipe, card).peak_reserved + context(run, card)


def context(run, card):
    published = run.figures.get("context_bytes") if run.kind == "published" else None
    return card.context if published is None else published


def parameters(recipe):
    with torch.device("meta"):
        model = models.build(recipe.model, recipe.task)
    return sum(parameter.numel() for parameter in model.parameters())


def fitcheck(recipe, run, card):
    """fitcheck-llm: the total of its report.

    It reads a config.json and a parameter count from the hub. Here memlab supplies both, so that
    the program's own parser and its own refusals run.
    """
    import fitcheck as program

    if recipe.precision.endswith("amp"):
        raise Refused("has no autocast: weights and computation share one format")
    if recipe.freeze:
        raise Refused("has no frozen layers")
    optimizers = {"adamw_torch": "adamw", "adamw_8bit": "adam8bit", "sgd": "sgd"}
    optimizers |= {"adamw_torch_fused": "adamw", "adamw_torch_loop": "adamw"}
    if recipe.optimizer not in optimizers:
        raise Refused(f"has no {recipe.optimizer}")
    targets = recipe.lora_targets
    if targets == "all-linear":
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    training = program.TrainingConfig(
        precision=recipe.precision,
        optimizer=optimizers[recipe.optimizer],
        batch_size=recipe.batch_size,
        seq_len=recipe.seq_len,
        lora_rank=recipe.lora_rank or None,
        lora_targets=list(targets),
        grad_checkpoint=recipe.checkpointing != "none",
        flash_attn=recipe.attention == "sdpa",
        grad_accum_steps=recipe.accumulation,
    )
    keys = {"T4": "t4", "P100": "p100-16", "V100": "v100-16", "L4": "l4", "L40S": "l40s"}
    keys |= {"A100-40GB": "a100-40", "A100-80GB": "a100-80", "H100": "h100", "H200": "h200"}
    keys |= {"RTX-3090": "3090", "RTX-4090": "4090", "A10G": "a10"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(models.config(recipe.model).to_dict()))
        parser = "fitcheck.config_parser"
        with (
            mock.patch(f"{parser}.hf_hub_download", return_value=path),
            mock.patch(f"{parser}._reported_param_count", return_value=parameters(recipe)),
        ):
            try:
                config = program.fetch_model_config(models.MODELS[recipe.model])
                report = program.estimate(config, training, program.get_gpu(keys[card.name]))
            except ValueError as error:
                raise Refused(str(error)) from None
    return report.total_mib * MiB


def torch_preflight(recipe, run, card):
    """torch-preflight: the total of its breakdown, for the models of its own snapshot."""
    from torch_preflight import vram

    optimizers = {"adamw_8bit": "adamw-8bit", "lion_8bit": "lion-8bit", "sgd": "sgd-momentum"}
    optimizers |= {"adafactor": "adafactor", "adamw_torch": "adamw"}
    optimizers |= {"adamw_torch_fused": "adamw", "adamw_torch_loop": "adamw"}
    if recipe.optimizer not in optimizers:
        raise Refused(f"has no {recipe.optimizer}")
    profile = vram.resolve_profile(models.MODELS[recipe.model])
    if not profile.resolved:
        raise Refused(profile.reason)
    precisions = {"fp32": "fp32", "fp16-amp": "amp", "bf16-amp": "amp", "bf16": "pure-bf16"}
    frozen = 0.0
    if recipe.lora_rank or recipe.freeze:
        footprint = simulate(recipe)  # the program asks its user for these two counts
        frozen = 1 - footprint.trainable_parameters / footprint.parameters
    config = vram.RunConfig(
        batch_size=recipe.batch_size,
        seq_len=recipe.seq_len,
        precision=vram.PrecisionMode(precisions[recipe.precision]),
        optimizer=vram.OptimizerKind(optimizers[recipe.optimizer]),
        gradient_checkpointing=recipe.checkpointing != "none",
        flash_attention=recipe.attention == "sdpa",
        accumulation_steps=recipe.accumulation,
        frozen_fraction=frozen,
    )
    memory = int(card.total_memory)
    return vram.estimate_config(profile, config, gpu_memory=memory, with_remediations=False).total


def accelerate(recipe, run, card):
    """accelerate's estimator plus a context: weights, gradients and Adam, whatever the batch.

    It knows neither batch size nor length. It covers training of all weights with Adam in fp32 or
    mixed precision.
    """
    from accelerate.commands.estimate import estimate_training_usage

    if not recipe.optimizer.startswith("adamw_torch"):
        raise Refused("has no optimizer but Adam")
    if recipe.lora_rank or recipe.freeze:
        raise Refused("trains every weight")
    if recipe.precision == "bf16":
        raise Refused("has no training without fp32 weights")
    names = {"fp32": "float32", "fp16-amp": "float16", "bf16-amp": "bfloat16"}
    usage = estimate_training_usage(4 * parameters(recipe), names[recipe.precision])
    return max(usage.values()) + context(run, card)


PROGRAMS = {
    "memlab": (memlab, "memlab"),
    "fitcheck-llm": (fitcheck, "fitcheck"),
    "torch-preflight": (torch_preflight, "torch_preflight"),
    "accelerate": (accelerate, "accelerate"),
}


def installed() -> dict:
    found = {}
    for name, (ask, module) in PROGRAMS.items():
        try:
            importlib.import_module(module)
            found[name] = ask
        except ImportError as error:
            print(f"{name}: left out, it cannot be imported ({error})")
    return found


def main(files):
    runs = find_records(loop="") + [run for path in files for run in load(path)]
    runs = [run for run in runs if "device_used_bytes" in run.figures]
    errors, refusals = collections.defaultdict(list), collections.defaultdict(list)
    programs = installed()
    print(f"\n{'run: device used, MiB':<58}" + "".join(f"{name:>17}" for name in programs))
    for run in tqdm(runs, leave=False):
        card, recipe = gpu_of_device(run.device), Recipe(**run.recipe)
        if card is None:
            continue
        used = run.figures["device_used_bytes"]
        line = f"{run.name[:46]:<46}{used / MiB:>12,.0f}"
        kind = "published" if run.kind == "published" else run.device
        for name, ask in programs.items():
            try:
                error = ask(recipe, run, card) / used - 1
                errors[kind, name].append(error)
                line += f"{error:>+17.1%}"
            except (Refused, torch.OutOfMemoryError) as why:
                refusals[kind, name].append(str(why).splitlines()[0])
                line += f"{'refused':>17}"
        tqdm.write(line)
    print()
    for kind, name in dict.fromkeys([*errors, *refusals]):
        found, refused = errors[kind, name], refusals[kind, name]
        line = f"{kind}, {name}: {len(found)} answered, {len(refused)} refused"
        if found:
            line += f"; median error {statistics.median(map(abs, found)):.1%}"
            line += f", worst over {max(0, *found):+.1%}, worst under {min(0, *found):+.1%}"
        print(line)
        for why, times in collections.Counter(refused).items():
            print(f"    {times} x {why[:130]}")


if __name__ == "__main__":
    main(sys.argv[1:])
