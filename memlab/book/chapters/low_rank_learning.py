"""A small Llama that is pretrained on one kind of text and adapted to another."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

import peft
import torch

from memlab import models
from memlab.book import corpora, show
from memlab.book.chapters.low_rank import LINEAR, half_dtype
from memlab.book.lessons import small_config, train_on, train_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS = (1, 2, 4, 8, 16, 32, 64)
# (rank, learning rate), chosen by hand: low ranks take a larger rate than the weights themselves.
RATES = {"rank 1": (1, 4e-2), "rank 8": (8, 2e-2), "QLoRA, rank 8": (8, 2e-2)}
RATES |= {"rank 64": (64, 1e-2), "all": (None, 1e-2)}


class Reader:
    """A Llama of two layers, 64 wide, pretrained on docstrings of NumPy and pandas.

    `pretrained` is the model and `start_loss` its loss on held-out pages of this book; `old`,
    `new` and `held_out` are blocks of 32 tokens.
    """

    def __init__(self, device: torch.device):
        self.device = device
        docs = corpora.docstrings(["numpy", "pandas"], "all", min_words=20)["text"]
        docs = random.Random(0).sample(list(docs), 600)
        self.tokenizer = corpora.tokenizer(docs, vocab_size=512, kind="bpe")
        self.old, new = self._blocks(docs), self._blocks(corpora.pages()["text"][:])
        self.held_out, self.new = new[:150], new[150:]
        self.pretrained = self.fit(self.fresh(), self.old, 60, 6e-3, size=32)
        self.start_loss = self.loss(self.pretrained)
        self.folder = tempfile.mkdtemp()
        self.pretrained.save_pretrained(self.folder)

    def _blocks(self, texts: list[str]) -> torch.Tensor:
        cut = corpora.language_model_blocks(texts, self.tokenizer, length=32)
        ids = cut.with_format("torch")["input_ids"][:].to(self.device)
        torch.manual_seed(0)
        return ids[torch.randperm(len(ids)).to(self.device)]

    def fresh(self) -> torch.nn.Module:
        sizes = dict(vocab_size=len(self.tokenizer), hidden_size=64)
        sizes |= dict(intermediate_size=192, head_dim=16)
        sizes |= dict(num_attention_heads=4, num_key_value_heads=4)
        sizes |= dict(bos_token_id=None, eos_token_id=None)
        config = small_config("llama-3-8b-tiny", **sizes)
        return models.build(config, attention="sdpa").to(self.device)

    def copy(self) -> torch.nn.Module:
        """Of the pretrained model."""
        model = self.fresh()
        model.load_state_dict(self.pretrained.state_dict())
        return model

    def fit(
        self,
        model: torch.nn.Module,
        data: torch.Tensor,
        steps: int,
        rate: float,
        seed: int = 0,
        size: int = 16,
    ) -> torch.nn.Module:
        """The model after some steps on random blocks, under a rate that rises and then falls."""

        def share(step: int) -> float:
            return min(1, (step + 1) / 10) * (1 - step / steps)

        torch.manual_seed(seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, rate, fused=True, weight_decay=0)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        chosen = torch.randint(len(data), (steps, size)).to(self.device)
        train_on(model, optimizer, [data[rows] for rows in chosen], rates)
        return model

    @torch.no_grad()
    def loss(self, model: torch.nn.Module, data: torch.Tensor | None = None) -> float:
        data = self.held_out if data is None else data
        return model(input_ids=data, labels=data).loss.item()

    def of_4_bits(self) -> torch.nn.Module:
        """The pretrained model on a base of NF4, loaded from its file."""
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        asked = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=half_dtype(self.device),
        )
        how = dict(quantization_config=asked, device_map=self.device)
        return AutoModelForCausalLM.from_pretrained(self.folder, **how)

    def gain(self, model: torch.nn.Module) -> float:
        """How far the loss on held-out text has fallen."""
        return self.start_loss - self.loss(model)


def adapted(base: torch.nn.Module, rank: int, seed: int = 0) -> torch.nn.Module:
    """LoRA of peft on all linear layers and the head."""
    torch.manual_seed(seed)
    targets = [*LINEAR, "lm_head"]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    return peft.get_peft_model(base, config).train()


class FullChange:
    """What full training changed, and what is left of it at lower ranks.

    `change` is the difference of each weight, `svds` the decompositions of those that are
    matrices; `gain` is the fall of the loss and `kept` the share of it that a change cut down to
    each of `RANKS` keeps. `norms`: shares of the squared norm in the r largest singular values,
    of the change and of random matrices of its shapes.
    """

    def __init__(self, reader: Reader):
        tuned = reader.fit(reader.copy(), reader.new, 20, 1e-2)
        self.gain = reader.gain(tuned)
        start = reader.pretrained.state_dict()
        state = tuned.state_dict()
        self.change = {n: w - start[n] for n, w in state.items()}
        matrices = {n: d for n, d in self.change.items() if d.dim() == 2}
        self.svds = {n: torch.linalg.svd(d, full_matrices=False) for n, d in matrices.items()}
        self.kept = {}
        for rank in RANKS:
            weights = dict(state)
            for name, (u, s, v) in self.svds.items():
                weights[name] = start[name] + (u[:, :rank] * s[:rank]) @ v[:rank]
            model = reader.fresh()
            model.load_state_dict(weights)
            self.kept[rank] = reader.gain(model) / self.gain
        torch.manual_seed(0)
        noise = [torch.randn_like(d) for d in matrices.values()]
        self.norms = {"norm of the change": _energy([s for _, s, _ in self.svds.values()])}
        self.norms["norm, random"] = _energy([torch.linalg.svdvals(m) for m in noise])


def _energy(values: list[torch.Tensor]) -> torch.Tensor:
    squares = torch.stack(values) ** 2
    return (squares.cumsum(1) / squares.sum(1, keepdim=True)).mean(0).cpu()


def compared(reader: Reader, seeds: int = 3) -> dict[str, list[float]]:
    """The fall of the loss by LoRA of some ranks and by training everything, for each seed."""
    gains: dict[str, list[float]] = {name: [] for name in RATES}
    for seed in range(seeds):
        for name, (rank, rate) in RATES.items():
            model = reader.of_4_bits() if name.startswith("QLoRA") else reader.copy()
            model = adapted(model, rank, seed) if rank else model
            gains[name].append(reader.gain(reader.fit(model, reader.new, 16, rate, seed)))
    return gains


def draw_gains(gains: Mapping[str, list[float]]) -> Figure:
    fig, ax = show.figure(5, 2.8)
    for x, values in enumerate(gains.values()):
        ax.bar(x, statistics.fmean(values), color=show.COLOURS["inputs"])
        ax.plot([x] * len(values), values, "o", color=show.GREY, markersize=5)
    labels = [name.replace(", ", "\n").replace("k ", "k\n") for name in gains]
    ax.set_xticks(range(len(gains)), labels)
    ax.set(ylabel="fall of the loss")
    return fig


def adapters_moved(reader: Reader, early: bool) -> tuple[float, int]:
    """(norm of all B after three steps, first moments), the optimizer made before or after peft."""
    model = reader.copy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = adapted(model, 4)
    if not early:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        train_step(model, optimizer, {"input_ids": reader.new[:8], "labels": reader.new[:8]})
    lines = [p for n, p in model.named_parameters() if "lora_B" in n]
    held = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    return sum(p.norm().item() for p in lines), held


def first_loss(reader: Reader, adapter: type[torch.nn.Module]) -> str:
    """The first loss with untrained adapters, beside the pretrained model's: same, smaller...

    adapter: made of (layer, rank, alpha).
    """
    torch.manual_seed(0)
    model = reader.copy()
    for name, module in list(model.named_modules()):
        if name.split(".")[-1] in LINEAR:
            model.set_submodule(name, adapter(module, 4, 8).to(reader.device))
    was, now = (reader.loss(m, reader.old[:200]) for m in (reader.pretrained, model))
    return "same" if was == now else "larger" if now > was else "smaller"
