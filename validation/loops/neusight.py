"""NeuSight's passes: forward and backward of transformers in fp32, on four kinds of cards.

sitar-lab/NeuSight at 6945927 (MIT), scripts/asplos/label: the seconds of a forward and a backward
pass of whole models, without an optimizer, in eager mode with transformers' eager attention
(neusight/Tracing/trace.py). Its own predictor is off by 7.3 % in the mean on all 26.

Assumptions, made before any prediction was compared:

- **The A100 and the V100 are the SXM cards.** Its own are PCIe cards, whose clocks are lower.
- **What the four mixtures of experts took is left out**: its program replaces their routing.
"""

import torch
from torch.nn import functional as F

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU
from memlab.spec.recipe import Recipe


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The second forward and backward pass."""
    recipe = Recipe(**run.recipe)
    with SimulatedGPU(card.without_limit()) as gpu:
        model = models.build(recipe.model, recipe.task, torch.float32, "eager").to("cuda")
        ids = torch.ones(recipe.batch_size, recipe.seq_len, dtype=torch.long, device="cuda")
        nothing = torch.zeros(1, device="cuda", requires_grad=True)
        step = torch.optim.SGD([nothing])  # tells one pass from the next
        for _ in range(2):
            logits = model(input_ids=ids).logits
            F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
            model.zero_grad()
            nothing.grad = torch.zeros_like(nothing)
            step.step()
    return gpu.footprint
