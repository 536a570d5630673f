"""torch-preflight's calibration: full fine-tuning under autocast, on a T4.

Source: torch-preflight 0.5.0, source distribution, tests/calibration (MIT). measure_cuda.py is the
loop; measured_peaks.json holds the figures.

Assumptions, written down before any prediction was compared:

- **Autocast uses bf16.** The loop takes bf16 if `torch.cuda.is_bf16_supported()` is true, and by
  default that includes the T4's emulation.
- **Attention and dropout are those of the published configs**: sdpa, and dropout in training.
- **Today's transformers** stands for the release of the runs, which is not named.
- **A model is built on the host and moved as a whole**, the cache is empty before, and AdamW is
  multi-tensor.
- **ResNet-50 is built by transformers** with the in-place ReLU of torchvision's ResNet-50, which
  has the same sizes and parameters. Workspaces of cuDNN's convolutions are not simulated.
"""

import torch
from transformers import AutoModel, AutoModelForCausalLM, ResNetConfig, ResNetForImageClassification

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The footprint of the second step."""
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
                loss, out = loss_of(model, inputs)  # `out` stays alive until the step ends
            loss.backward()
            optimizer.step()

        step()
        gpu.reset_peak()
        step()
        return gpu.footprint


def build(name: str):
    """ResNet-50, or a language model: GPT-2 with its head, BERT and DistilBERT without one."""
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
    """(the loss, the model's outputs, which the loop keeps alive)."""
    if model.get_output_embeddings() is not None:
        out = model(input_ids=tokens, labels=tokens)
        return out.loss, out
    out = model(input_ids=tokens)
    return out.last_hidden_state.float().pow(2).mean(), out


def image_loss(model, inputs):
    """(the loss, None): for images the loop keeps no outputs."""
    images, classes = inputs
    return torch.nn.functional.cross_entropy(model(images).logits, classes), None
