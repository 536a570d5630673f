"""NeuSight's measurements: a forward and a backward pass of transformers in fp32, on four GPUs.

Source: sitar-lab/NeuSight at 6945927 (MIT), scripts/asplos/label. It has the seconds of one forward
and one backward pass of whole models, without an optimizer. The models run in eager mode with
transformers' eager attention (neusight/Tracing/trace.py). NeuSight's own predictor has a mean error
of 7.3 % on all 26.

Assumptions, made before any prediction was compared:

- **The A100 and the V100 are the SXM versions.** NeuSight's are PCIe versions with lower clocks.
- **The four mixtures of experts are left out**, because NeuSight's program replaces their routing.
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
    """The footprint of the second forward and backward pass."""
    recipe = Recipe(**run.recipe)
    with SimulatedGPU(card.without_limit()) as gpu:
        model = models.build(recipe.model, recipe.task, torch.float32, "eager").to("cuda")
        ids = torch.ones(recipe.batch_size, recipe.seq_len, dtype=torch.long, device="cuda")
        nothing = torch.zeros(1, device="cuda", requires_grad=True)
        # The simulated GPU counts steps by optimizer steps: one over a tensor of a single number.
        step = torch.optim.SGD([nothing])
        for _ in range(2):
            logits = model(input_ids=ids).logits
            F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
            model.zero_grad()
            nothing.grad = torch.zeros_like(nothing)
            step.step()
    return gpu.footprint
