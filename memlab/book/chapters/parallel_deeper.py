"""What the page below chapter 17 runs: adapters in shards, shards on the host, judged mixtures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from memlab import models
from memlab.book import show
from memlab.book.lessons import small_config, train_step
from memlab.card.device import SimulatedGPU
from memlab.footprint import Footprint
from memlab.gpus import find_gpu
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB


def adapters() -> pd.DataFrame:
    """Peak and parameters in MiB of Llama 3.2 1B, full, LoRA and QLoRA, on one and one of eight."""
    full = Recipe("llama-3.2-1b", seq_len=512, precision="bf16-amp")
    full = full.but(attention="sdpa", optimizer="adamw_torch_fused")
    lora, split = full.but(lora_rank=16), dict(ranks=8, sharding="zero3")
    recipes = {
        "all weights, one card": full,
        "all weights, one of 8": full.but(**split),
        "LoRA, one card": lora,
        "LoRA, one of 8": lora.but(**split),
        "QLoRA, one of 8": lora.but(base="nf4", **split),
    }
    rows = {}
    for name, recipe in recipes.items():
        # Each layer of split adapters adds the same bytes, to the peak, too.
        sizes = _by_layers(recipe) if recipe.lora_rank and recipe.ranks > 1 else _sizes(recipe)
        rows[name] = {"peak, MiB": sizes[0] / MiB, "of it parameters": sizes[1] / MiB}
    return pd.DataFrame(rows).T


def _sizes(recipe: Recipe) -> tuple[int, int]:
    """Bytes of the peak and of the parameters in it."""
    run = simulate(recipe, find_gpu("RTX-4090").without_limit())
    return run.peak_allocated, run.breakdown["parameters"]


def _by_layers(recipe: Recipe) -> list[int]:
    """The same from runs of two and of three layers, in a fifth of the time."""
    few = (_sizes(recipe.but(model=models.with_layers(recipe.model, n))) for n in (2, 3))
    more = models.config(recipe.model).num_hidden_layers - 2
    return [two + more * (three - two) for two, three in zip(*few, strict=True)]


def copies_table(runs: Mapping[tuple[str, str], Footprint]) -> pd.DataFrame:
    """Peak in GiB, and the seconds of a step over each link; (way, link) -> run."""
    rows: dict[str, dict[str, Any]] = {}
    for (way, link), run in runs.items():
        assert run.step_seconds is not None  # of a card with rates
        row = rows.setdefault(way, {"peak, GiB": f"{run.peak_allocated / 2**30:.1f}"})
        row[f"s, {link}"] = show.between(run.step_seconds.low, run.step_seconds.high)
    return pd.DataFrame(rows).T


def rest_of_nf4(model: str, ranks: int) -> tuple[float, float, float]:
    """MiB of a rank's share of the embedding in fp32, of all blocks' scales, which it keeps whole,
    and of its share of the codes."""
    with torch.device("meta"):
        base = models.build(model).model
    embedding = base.embed_tokens.weight.numel() * 4 / ranks / MiB
    weights = sum(w.numel() for w in base.layers.parameters() if w.dim() == 2)
    return embedding, weights / 64 * 4 / MiB, weights / 2 / ranks / MiB


def offloaded() -> dict[str, Footprint]:
    """Four layers of Llama 3.2 1B in fp32 as one of eight ranks, shards here and on the host."""
    config = small_config("llama-3.2-1b", num_hidden_layers=4)

    def rank_of_eight(**policy: Any) -> Footprint:
        with SimulatedGPU("RTX-4090", ranks=8) as gpu:
            with torch.device("meta"):
                model = models.build(config, attention="sdpa")
            for layer in [*model.model.layers, model]:
                fully_shard(layer, **policy)
            model.to_empty(device="cpu" if policy else "cuda")
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            ids = torch.ones(1, 512, dtype=torch.long, device="cuda")
            for _ in range(2):
                gpu.reset_peak()
                train_step(model, optimizer, {"input_ids": ids, "labels": ids})
        return gpu.footprint

    gone = rank_of_eight(offload_policy=CPUOffloadPolicy())
    return {"on the card": rank_of_eight(), "offloaded": gone}


@torch.no_grad()
def judged(model: Any, held_out: torch.Tensor) -> tuple[float, float]:
    """(loss of text without the auxiliary part, the busiest expert's load over an even one)."""
    out = model(input_ids=held_out, output_router_logits=True)
    logits = out.logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, held_out[:, 1:].flatten())
    config, loads = model.config, []
    for scores in out.router_logits:
        chosen = scores.topk(config.num_experts_per_tok).indices.flatten()
        load = chosen.bincount(minlength=config.num_local_experts)
        loads.append((load / load.float().mean()).max().item())
    return loss.item(), max(loads)


def experts_table(
    configs: Mapping[str, Any], trained: Callable[[Any, int], tuple[float, float]]
) -> pd.DataFrame:
    """Each model trained from two seeds, and its parameters, states (MiB) and operations.

    trained: (config, seed) -> `judged` of the trained model.
    """
    rows = {}
    for name, config in configs.items():
        results = [trained(config, seed) for seed in (0, 1)]
        total, active = models.active_parameters(config)
        run = simulate(Recipe(config, batch_size=16, seq_len=32), "H100")
        parts = ("parameters", "gradients", "optimizer_states")
        rows[name] = {
            "parameters": total,
            "active": active,
            "loss, seed 0": results[0][0],
            "loss, seed 1": results[1][0],
            "busiest expert": sum(load for _, load in results) / 2,
            "MiB, simulated": sum(run.breakdown[part] for part in parts) / MiB,
            "GFLOP a step": run.step_seconds.flops / 1e9,
        }
    return pd.DataFrame(rows).T.astype({"parameters": int, "active": int})
