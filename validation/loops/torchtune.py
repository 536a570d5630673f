"""torchtune's ladder of memory techniques: Llama-3.2-3B in bf16, batches of 2 x 4,096, on an A100.

Source: pytorch/torchtune (BSD-3-Clause), README.md of 2024-11-18 (commit 1814feb17), section
"Optimization flags". It gives the peak of active memory after each technique. The model below
repeats torchtune's modules of that commit in plain PyTorch, operation by operation.

Assumptions, written down before any prediction was compared:

- **Batches are packed** and carry positions. Attention under a block mask (flex attention) saves
  what flash attention saves.
- **The first row runs eagerly**: cross-entropy of fp32 logits, without checkpointing. AdamW is
  assumed to be fused; the README does not say.
- **With checkpointing and `compile` the layers run eagerly**, because compiling changes one
  recomputed layer at most. The compiled loss of a chunk keeps its bf16 logits and a log-sum-exp,
  and gives bf16 gradients.
- **Some rows are not simulated**: rows whose layers are compiled without checkpointing, and the
  baseline, whose batch lengths are not published. QLoRA is left out because its 4-bit format is
  torchao's.
- **Offloading is `save_on_cpu` with pinned memory**, without the output layer. torchtune's own
  offloading copies on a second stream, which the simulated GPU does not have.
- **8-bit AdamW is that of bitsandbytes**, one optimizer per parameter. The README links to a page
  that names torchao's first and bitsandbytes' second, as the one that saves more.
- **LoRA has rank 64** on query, value, output and the feed-forward layers, in bf16.
- **The peak is that of the whole run**, that is, of two steps: torchtune never resets it.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU
from memlab.libraries import import_bitsandbytes
from memlab.spec.recipe import Recipe

CHUNKS = 8  # chunks of the sequence, of torchtune's chunked loss


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The footprint of two steps.

    `run.settings` may switch on `chunked_loss`, `step_in_backward` and `offloading`.
    """
    recipe, told = Recipe(**run.recipe), run.settings
    with SimulatedGPU(card) as gpu:
        model = Decoder(models.config(recipe.model), recipe.lora_rank)
        model.to("cuda")
        model.checkpointed = recipe.checkpointing != "none"
        model.chunks = CHUNKS if told.get("chunked_loss") else 0
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizers = [[p] for p in trained] if told.get("step_in_backward") else [trained]
        optimizers = [make_optimizer(recipe.optimizer, group) for group in optimizers]
        if told.get("step_in_backward"):
            for parameter, optimizer in zip(trained, optimizers, strict=True):
                parameter.register_post_accumulate_grad_hook(stepping(optimizer))
        shape = recipe.batch_size, recipe.seq_len
        for _ in range(2):
            tokens, positions, labels = (
                torch.zeros(shape, dtype=torch.long, device="cuda") for _ in range(3)
            )
            counted = (labels != -100).sum()
            with offloaded() if told.get("offloading") else contextlib.nullcontext():
                logits = model(tokens, positions)
            last = torch.full((recipe.batch_size, 1), -100, device="cuda")
            loss = loss_of(logits, torch.hstack((labels[:, 1:], last))) * counted
            del logits
            loss.backward()
            if not told.get("step_in_backward"):
                # torchtune weights the loss by the number of tokens and scales the gradients back.
                for parameter in trained:
                    parameter.grad *= 1 / counted
                (optimizer,) = optimizers
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return gpu.footprint


def make_optimizer(name: str, parameters):
    if name == "adamw_8bit":
        return import_bitsandbytes(name).optim.AdamW8bit(parameters)
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(parameters, fused=True)
    raise ValueError(f"optimizer is {name!r}: allowed are adamw_8bit, adamw_torch_fused")


def stepping(optimizer):
    """A hook that steps the optimizer as soon as its gradient is complete, and frees it."""

    def step(_):
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def offloaded():
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        yield


def on_card():
    """Inside, saved tensors stay on the GPU, even if `offloaded` is active around it."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


# ---------------------------------------------------------------------- the loss


class CompiledLoss(torch.autograd.Function):
    """The summed cross-entropy of a chunk, allocated as by compiled code.

    A compiler fuses the cast to fp32, so there is no fp32 copy of the logits. Only allocations
    matter here: the results are uninitialised.
    """

    @staticmethod
    def forward(ctx, logits, labels):
        log_sum = logits.new_empty(logits.size(0), 1, dtype=torch.float32)  # [tokens, 1]
        ctx.save_for_backward(logits, labels, log_sum)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, _):
        logits, _, _ = ctx.saved_tensors
        return torch.empty_like(logits), None


def loss_of(logits, labels):
    """The mean loss: of one tensor of fp32 logits, or of a list of chunks in bf16."""
    if torch.is_tensor(logits):
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
    total = (labels != -100).sum()
    loss = 0.0
    for part, answers in zip(logits, labels.chunk(CHUNKS, dim=1), strict=True):
        loss = loss + CompiledLoss.apply(part.reshape(-1, part.size(-1)), answers.reshape(-1))
    return loss / total


# ---------------------------------------------------------------------- the model


class Norm(nn.Module):
    """RMS norm, computed in fp32 and scaled in the input's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.scale


def rotated(x, table):
    """Apply rotary positions to neighbouring pairs, in fp32.

    x: [batch, length, heads, head size]. table: cosines and sines, [batch, length, head size / 2,
    2].
    """
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = table.view(-1, pairs.size(1), 1, pairs.size(3), 2)
    (even, odd), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return turned.flatten(3).type_as(x)


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained one of low rank."""

    def __init__(self, wide: int, out: int, rank: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, wide), requires_grad=False)
        self.lora_a, self.lora_b = nn.Linear(wide, rank, False), nn.Linear(rank, out, False)

    def forward(self, x):
        out = F.linear(x, self.weight)
        return out + 2.0 * self.lora_b(self.lora_a(x))  # alpha is twice the rank


class Layer(nn.Module):
    def __init__(self, config, rank: int):
        super().__init__()
        size, wide, inner = config.head_dim, config.hidden_size, config.intermediate_size
        self.size, self.heads = size, config.num_attention_heads
        self.groups = config.num_key_value_heads

        def linear(wide, out, adapted=True):
            return LoRALinear(wide, out, rank) if adapted and rank else nn.Linear(wide, out, False)

        self.q, self.out = linear(wide, self.heads * size), linear(self.heads * size, wide)
        self.k, self.v = (linear(wide, self.groups * size, adapted) for adapted in (False, True))
        self.gate, self.up, self.down = (
            linear(wide, inner),
            linear(wide, inner),
            linear(inner, wide),
        )
        self.before_attention = Norm(wide, config.rms_norm_eps)
        self.before_mlp = Norm(wide, config.rms_norm_eps)

    def forward(self, x, table):
        x = self.attention(self.before_attention(x), table) + x
        return x + self.mlp(self.before_mlp(x))

    def attention(self, x, table):
        batch, length, _ = x.shape
        q = rotated(self.q(x).view(batch, length, -1, self.size), table()).transpose(1, 2)
        k, v = (layer(x).view(batch, length, -1, self.size) for layer in (self.k, self.v))
        k, v = rotated(k, table()).transpose(1, 2), v.transpose(1, 2)
        # Repeat each key-value head for its query heads: [batch, heads, length, head size].
        shape = batch, self.groups, self.heads // self.groups, length, self.size
        k, v = (t.unsqueeze(2).expand(shape).flatten(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).contiguous().view(batch, length, -1))

    def mlp(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """A Llama decoder whose output layer is tied to its embeddings.

    rank: the rank of LoRA; 0 trains all weights.
    """

    def __init__(self, config, rank: int):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, rank) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.to(torch.bfloat16)
        # After the cast to bf16: torchtune keeps the rotary table in fp32.
        table = torch.empty(config.max_position_embeddings, config.head_dim // 2, 2)
        self.register_buffer("table", table, persistent=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not rank or "lora_" in name)

    def forward(self, tokens, positions):
        x = self.embeddings(tokens)
        # Each call of attention looks the positions up again, as torchtune's modules do.
        looked_up = lambda: self.table[positions]  # noqa: E731
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, looked_up, use_reentrant=False)
            else:
                x = layer(x, looked_up)
        x = self.norm(x)
        if not self.chunks:
            return F.linear(x, self.embeddings.weight).float()
        with on_card():
            return [F.linear(part, self.embeddings.weight) for part in x.chunk(self.chunks, dim=1)]
