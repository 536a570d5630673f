"""The loop of fitcheck-llm's measurements: LoRA on a decoder in fp16 or NF4, on a T4.

Source: fitcheck-llm 0.3.1, data/measurements (https://github.com/Anassbzdd/fitcheck, MIT).

Assumptions:

- **None**: its description names every setting.
"""

import contextlib
from dataclasses import dataclass
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU
from memlab.predict.simulate import full_log, serve
from memlab.spec.recipe import QUANTIZED, Recipe
from memlab.workloads.quantized import load, quantize_base
from memlab.workloads.training import import_peft


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The second step of a run, with the base loaded in the order of today's `from_pretrained`."""
    recipe = Recipe(**run.recipe)
    return serve(recipe, full_log(recipe, card, two_steps), card)


@dataclass
class Trained:
    """The result of a loop, as `full_log` needs it: the trained model and its recipe."""

    recipe: Recipe
    model: torch.nn.Module


def two_steps(recipe: Recipe, gpu: SimulatedGPU) -> Trained:
    """Train two steps inside an entered `SimulatedGPU` and count the second.

    The loop uses AdamW, checkpointing and one batch of random ids. `out` stays alive until the step
    ends. With sdpa it allows the memory-efficient kernel only. Everything that is not quantized is
    in fp16.
    """
    peft = import_peft()
    model = models.build(recipe.model, dtype=torch.float16, attention=recipe.attention)
    if recipe.base in QUANTIZED:
        quantize_base(model, recipe)
        load(model, "cuda")
    model.to("cuda")
    if recipe.base in QUANTIZED:
        model = peft.prepare_model_for_kbit_training(model)
    targets = list(recipe.lora_targets)
    model = peft.get_peft_model(model, peft.LoraConfig(r=recipe.lora_rank, target_modules=targets))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    batch = torch.randint(0, 100, (recipe.batch_size, recipe.seq_len), device="cuda")

    def step():
        optimizer.zero_grad()
        out = model(input_ids=batch, labels=batch)
        out.loss.backward()
        optimizer.step()

    with efficient_kernel() if recipe.attention == "sdpa" else contextlib.nullcontext():
        step()
        gpu.reset_peak()
        step()
    return Trained(recipe, model)


@contextlib.contextmanager
def efficient_kernel():
    """Allow only the memory-efficient kernel, and repeat shared keys, which it does not accept."""
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, *args, enable_gqa=False, **kwargs):
        groups = query.size(-3) // key.size(-3)
        if groups > 1:
            key, value = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
        return original(query, key, value, *args, **kwargs)

    patched = mock.patch.object(torch.nn.functional, original.__name__, attention)
    with patched, sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        yield
