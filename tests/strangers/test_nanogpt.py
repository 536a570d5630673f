"""The loop of nanoGPT's train.py (github.com/karpathy/nanoGPT, MIT), written anew and small."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import SimulatedGPU

VOCABULARY, BLOCK, WIDTH, BATCH = 1024, 128, 128, 4


class Attention(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows, tokens, _ = x.shape
        q, k, v = (
            part.view(rows, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(rows, tokens, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets=None):
        positions = torch.arange(tokens.size(1), dtype=torch.long, device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )


def train(folder, dtype, layers=2, steps=3, accumulation=4):
    """The lines of train.py in their order; gives what it printed."""
    device = "cuda"
    device_type = "cuda" if "cuda" in device else "cpu"
    context = torch.amp.autocast(device_type=device_type, dtype=dtype)

    def get_batch():
        data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        places = torch.randint(len(data) - BLOCK, (BATCH,))
        x, y = (
            torch.stack(
                [
                    torch.from_numpy(data[i + shift : i + shift + BLOCK].astype(np.int64))
                    for i in places
                ]
            )
            for shift in (0, 1)
        )
        return (part.pin_memory().to(device, non_blocking=True) for part in (x, y))

    model = GPT(layers).to(device)
    scaler = torch.amp.GradScaler(device_type, enabled=(dtype == torch.float16))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def estimate_loss(batches=2):
        model.eval()
        losses = torch.zeros(batches)
        for k in range(batches):
            x, y = get_batch()
            with context:
                _, loss = model(x, y)
            losses[k] = loss.item()
        model.train()
        return losses.mean()

    printed = []
    x, y = get_batch()
    for step in range(steps):
        rate = 6e-4 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if step % 2 == 0:
            printed.append(f"step {step}: val loss {estimate_loss():.4f}")
        for _ in range(accumulation):
            with context:
                _, loss = model(x, y)
                loss = loss / accumulation
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        printed.append(f"iter {step}: loss {loss.item() * accumulation:.4f}, lr {rate:e}")
    return printed


@pytest.fixture
def folder(tmp_path):
    np.random.seed(0)
    np.random.randint(0, VOCABULARY, 4096).astype(np.uint16).tofile(tmp_path / "train.bin")
    return tmp_path


def footprint(folder, dtype=torch.bfloat16, **settings):
    with SimulatedGPU("A100-40GB") as gpu:
        printed = train(folder, dtype, **settings)
        assert printed[0] == "step 0: val loss 1.0000"
        assert len(printed) == 5
    return gpu.footprint


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_gradients_and_states_are_those_of_the_model(folder, dtype):
    found = footprint(folder, dtype).breakdown
    weights = list(GPT().parameters())
    nbytes = sum(weight.nbytes for weight in weights)
    assert found["parameters"] == found["gradients"] == nbytes
    # The fused step counts on the card, a number for each weight.
    assert found["optimizer_states"] == 2 * nbytes + 4 * len(weights)


@pytest.mark.slow
def test_each_layer_keeps_what_its_formula_says(folder):
    two, four = (footprint(folder, layers=layers).breakdown for layers in (2, 4))
    tokens, heads = BATCH * BLOCK, 4
    # Two residual sums in fp32, two norms' outputs, queries, keys and values, the attention's
    # output, and the hidden layer before and after GELU.
    kept = (2 * 4 + (2 + 3 + 1 + 4 + 4) * 2) * tokens * WIDTH
    kept += 4 * 4 * tokens  # mean and deviation of two norms
    kept += 4 * heads * tokens  # the logarithm of each row's sum
    kept += 24  # the attention's random state
    kept += 2 * 12 * WIDTH**2  # autocast's copies of the weights
    assert four["activations"] - two["activations"] == 2 * kept
