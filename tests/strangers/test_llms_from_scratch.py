"""The loop of LLMs-from-scratch, chapter 5 (github.com/rasbt/LLMs-from-scratch, Apache-2.0)."""

import torch
from helpers import assert_as_on_the_cpu, on_the_cpu
from torch import nn
from torch.utils.data import DataLoader, Dataset

from memlab import SimulatedGPU
from memlab.book.corpora import tokenizer

TEXT = "the cat sat on the mat and looked at the rain while the old clock told every hour. " * 60
CONTEXT, WIDTH, HEADS = 64, 64, 4


class Windows(Dataset):
    def __init__(self, text, words, length, stride):
        numbers = words.encode(text, add_special_tokens=False)
        self.inputs, self.targets = [], []
        for i in range(0, len(numbers) - length, stride):
            self.inputs.append(torch.tensor(numbers[i : i + length]))
            self.targets.append(torch.tensor(numbers[i + 1 : i + length + 1]))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        return self.inputs[i], self.targets[i]


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(variance + 1e-5) + self.shift


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.register_buffer("mask", torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1))

    def forward(self, x):
        rows, tokens, _ = x.shape
        q, k, v = (
            layer(x).view(rows, tokens, HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:tokens, :tokens], -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        mixed = (self.dropout(weights) @ v).transpose(1, 2)
        return self.out(mixed.contiguous().view(rows, tokens, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.first, self.second = Attention(), Norm(), Norm()
        self.hidden = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.first(x)))
        return x + self.dropout(self.hidden(self.second(x)))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = Norm(), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def loss_of(batch, model, device):
    inputs, targets = (part.to(device) for part in batch)
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def mean_loss(loader, model, device, batches):
    total = 0.0
    for i, batch in enumerate(loader):
        if i < batches:
            total += loss_of(batch, model, device).item()
    return total / batches


def train(data, vocabulary):
    """The chapter's `train_model_simple`; how often it has evaluated."""
    torch.manual_seed(123)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    model = GPT(vocabulary).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1, foreach=False)
    losses = []
    for _ in range(2):
        model.train()
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_of(batch, model, device).backward()
            optimizer.step()
            if step % 5 == 0:
                model.eval()
                with torch.no_grad():
                    losses.append(mean_loss(loader, model, device, batches=2))
                model.train()
    return len(losses)


def test_it_holds_what_the_same_loop_holds_on_a_real_cpu():
    words = tokenizer([TEXT], vocab_size=512, kind="bpe")
    data = Windows(TEXT, words, CONTEXT, 32)
    real, evaluated = on_the_cpu(lambda: train(data, len(words)))
    with SimulatedGPU("T4") as gpu:
        assert train(data, len(words)) == evaluated
    # Dropout keeps a byte an element on a card and a float on a CPU: of each layer's weights of
    # attention and of two outputs.
    dropped = 2 * (4 * HEADS * CONTEXT**2 + 2 * 4 * CONTEXT * WIDTH)
    there = 2 * 8 * CONTEXT * len(data)  # the windows themselves, if all of them were drawn
    assert_as_on_the_cpu(gpu.footprint, real, more_there=3 * dropped + there, small=4096)
