"""torch-preflight's calibration: full fine-tuning under autocast, on a T4.

torch-preflight 0.5.0, source distribution, tests/calibration (MIT): measure_cuda.py is the loop,
measured_peaks.json holds the figures.

Assumptions, written down before any prediction was compared:

- **Autocast is to bf16.** The loop takes bf16 where `torch.cuda.is_bf16_supported()` says so, and
  by default that counts the emulation of a T4.
- **Attention and dropout are those of the published configs**: sdpa, and dropout in training.
- **Today's transformers** stands for the release of the runs, which is not named.
- **A model is built on the host and moved whole**, the cache is empty before, AdamW is
  multi-tensor.
- **ResNet-50 is built by transformers** with the in-place ReLU of torchvision's, whose sizes and
  parameters are the same; workspaces of cuDNN's convolutions are not simulated.
"""

import torch
from transformers import AutoModel, AutoModelForCausalLM, ResNetConfig, ResNetForImageClassification

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The second step."""
    with SimulatedGPU(card) as gpu:
        model = build(run.recipe["model"])
        model = model.to("cuda").train()
        optimizer = torch.optim.AdamW(model.parameters())
        images = run.settings.get("image_size")
        loss_of = image_loss if images else text_loss
        size = (3, images, images) if images else (run.recipe["seq_len"],)
        inputs = inputs_of(run.recipe["batch_size"], size)

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss, out = loss_of(model, inputs)  # `out` lives on through the step
            loss.backward()
            optimizer.step()

        step()
        gpu.reset_peak()
        step()
        return gpu.footprint


def build(name: str):
    """GPT-2 with its head, BERT and DistilBERT without one, or ResNet-50."""
    if name == "resnet50":
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
        for module in model.modules():
            if isinstance(module, torch.nn.ReLU):
                module.inplace = True
        return model
    config = models.config(name)
    causal = models.default_task(config) == "causal-lm"
    return (AutoModelForCausalLM if causal else AutoModel).from_config(config)


def inputs_of(batch_size: int, size: tuple[int, ...]):
    """Images and their classes, or tokens."""
    if len(size) > 1:
        images = torch.randn(batch_size, *size, device="cuda")
        return images, torch.randint(0, 1000, (batch_size,), device="cuda")
    return torch.randint(0, 100, (batch_size, *size), device="cuda")


def text_loss(model, tokens):
    """The loss, and the outputs of the model that its loop holds."""
    if model.get_output_embeddings() is not None:
        out = model(input_ids=tokens, labels=tokens)
        return out.loss, out
    out = model(input_ids=tokens)
    return out.last_hidden_state.float().pow(2).mean(), out


def image_loss(model, inputs):
    """The loss; its loop holds nothing else."""
    images, classes = inputs
    return torch.nn.functional.cross_entropy(model(images).logits, classes), None
