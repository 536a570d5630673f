"""QLoRA for experts: what the cast to fp32 touches, what pages leave, what a merge makes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable

import pandas as pd
import torch

from memlab import models
from memlab.book.lessons import small_config
from memlab.card.device import SimulatedGPU
from memlab.card.kernels.sdpa import sdpa_route
from memlab.libraries import import_quietly
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB
from memlab.workloads.training import Training

peft = import_quietly("peft")
LORA = Recipe("llama-3-8b", seq_len=512, precision="bf16", lora_rank=16)
LORA = LORA.but(attention="sdpa", lora_fp32=False)
NF4 = LORA.but(base="nf4", double_quant=True, upcast=False)


def not_quantized(model: torch.nn.Module) -> dict[str, float]:
    """MiB of the weights that are not in four bits, by their kind."""
    held: dict[str, float] = {}
    for name, weight in model.named_parameters():
        if "lora_" not in name and weight.dtype != torch.uint8:
            kind = name.split(".")[-2]
            kind = "norms" if kind.endswith("norm") else kind
            held[kind] = held.get(kind, 0) + weight.nbytes / MiB
    return held


def cast_table(
    names: Iterable[str] = ("llama-3.2-1b", "llama-3-8b"), rank: int = 16
) -> pd.DataFrame:
    """MiB before and after `prepare_model_for_kbit_training`, of models of two layers."""
    cast = {}
    for name in names:
        with SimulatedGPU() as card:
            recipe = NF4.but(model=small_config(name, num_hidden_layers=2), lora_rank=rank)
            model = Training(recipe, card.device).model.get_base_model()
            before = not_quantized(model)
            peft.prepare_model_for_kbit_training(model)
        after = not_quantized(model)
        for kind, held in before.items():
            cast[name, kind] = {"before": held, "after": after[kind]}
    frame = pd.DataFrame(cast).T
    frame["costs"] = frame["after"] - frame["before"]
    return frame


def routes() -> dict[torch.dtype, str]:
    """The attention kernel for keys that four heads share, by the format of the tensors."""
    heads, found = [(8, n, 512, 64) for n in (32, 8, 8)], {}
    for kind in (torch.bfloat16, torch.float32):
        made = [torch.empty(h, dtype=kind, device="meta") for h in heads]
        found[kind] = sdpa_route(*made, is_causal=True, enable_gqa=True)
    return found


def kernels(recipe: Recipe) -> list[str]:
    """The attention kernels of one simulated step."""
    with SimulatedGPU("A100-40GB") as card:
        Training(recipe, card.device).step()
    lives = card.footprint.timeline.lives
    names = {life.operation for life in lives}
    return sorted(n for n in names if "softmax" in n or "_attention" in n)


def paged_states() -> pd.DataFrame:
    """MiB of 8-bit AdamW's states of Llama-3 8B on the card, and what its paged form can move.

    Each state is made once a weight, so that two runs of few layers give the exact sum.
    """
    trains = {"all weights": LORA.but(lora_rank=0), "all linear layers": LORA}
    trains["q and v"] = LORA.but(lora_targets="q_proj,v_proj")
    held = {
        kind: {n: _states(r.but(optimizer=kind, seq_len=16)) for n, r in trains.items()}
        for kind in ("adamw_8bit", "paged_adamw_8bit")
    }
    frame = pd.DataFrame(held) / MiB
    frame["can leave the card"] = frame["adamw_8bit"] - frame["paged_adamw_8bit"]
    return frame


def _states(recipe: Recipe) -> int:
    few = [small_config("llama-3-8b", num_hidden_layers=n) for n in (1, 2)]
    one, two = (simulate(recipe.but(model=c)).breakdown["optimizer_states"] for c in few)
    return two + 30 * (two - one)


def loader() -> Callable[[], torch.nn.Module]:
    """A function that loads a small Llama in 4 bits, the same one each time."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # dequantizing tells of its formats
    folder = tempfile.mkdtemp()
    models.build("llama-3.2-1b-tiny").save_pretrained(folder)
    four = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    how = dict(quantization_config=BitsAndBytesConfig(**four), device_map="cpu")
    return lambda: AutoModelForCausalLM.from_pretrained(folder, **how)


def with_adapters(base: torch.nn.Module, size: float = 0.02) -> torch.nn.Module:
    """The base with adapters whose B is not zero any more, but as large as training makes it."""
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    model = peft.get_peft_model(base, config).train()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=size)
    return model


@torch.no_grad()
def apart(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """How far the logits of one text are from those of another model, over their norm."""
    tokens = torch.arange(32)[None]
    mine, theirs = (m(tokens).logits for m in (model, other))
    return ((mine - theirs).norm() / theirs.norm()).item()
