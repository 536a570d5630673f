"""What chapter 10 draws, times and trains: batches of texts under several strategies.

A strategy is a function of (lengths, batch size, seed) that gives batches, lists of the numbers of
texts. `collate` is a function of (texts, width=None) that gives a model's inputs.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch.nn import functional
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

from memlab import models
from memlab.book import corpora, drawing, show
from memlab.book.lessons import small_config, train_on, train_step
from memlab.card.device import SimulatedGPU
from memlab.predict.formula import formula
from memlab.predict.measure import seconds
from memlab.predict.progress import Progress
from memlab.units import MiB

Batches = list[list[int]]
Strategy = Callable[..., Batches]

# ---------------------------------------------------------------- drawing


def canvas(lengths, batches, limit: int, width: int | None = None) -> np.ndarray:
    """Rows as pixels: 1 and 2 are texts, 3 is padding. A batch is a list of rows of texts."""
    lines = []
    for batch in batches:
        wide = width or max(sum(lengths[i] for i in row) for row in batch)
        for row in batch:
            line = [np.full(lengths[i], 1 + at % 2) for at, i in enumerate(row)]
            line.append(np.full(wide - sum(map(len, line)), 3))
            lines.append(np.concatenate([*line, np.zeros(limit - wide)]))
    return np.array(lines)


def picture(lengths, strategies: Mapping[str, Strategy], rows: Batches, limit: int, size: int):
    """Draw fixed padding, each strategy in batches of `size`, and packed rows, side by side."""
    single = {n: [[[i] for i in b] for b in f(lengths, size)] for n, f in strategies.items()}
    drawn = {"fixed": canvas(lengths, next(iter(single.values())), limit, limit)}
    drawn |= {name: canvas(lengths, batches, limit) for name, batches in single.items()}
    drawn["packed"] = canvas(lengths, [rows], limit, limit)
    fig, axes = show.figure(7, 3.6, ncols=len(drawn))
    paint = ListedColormap(["#00000000", "#0072b2", "#56b4e9", "#e69f00"])
    for ax, (name, pixels) in zip(axes, drawn.items(), strict=True):
        where = dict(extent=(0, limit, len(pixels), 0), aspect="auto")
        ax.imshow(pixels, cmap=paint, vmin=0, vmax=3, interpolation="nearest", **where)
        share = (pixels == 3).sum() / (pixels > 0).sum()
        ax.set_title(f"{name}\n{share:.0%} empty", fontsize=11)
        ax.grid(False)
        ax.set(xlim=(0, limit), ylim=(len(lengths), 0), xticks=[0, limit], yticks=[])


def draw_rows(
    lengths: Sequence[int], strategies: Mapping[str, Strategy], rows: Batches, limit: int
) -> Figure:
    """A few texts, numbered, in batches of four under each strategy, and in packed rows.

    rows: the packed ones, of the numbers of texts. limit: the fixed length, in tokens.
    """
    numbers, high, inch = range(len(lengths)), 0.21, (drawing.WIDTH / 2 - 0.1) / limit
    layouts = {"fixed": [[[i] for i in numbers[at : at + 4]] for at in numbers[::4]]}
    layouts |= {n: [[[i] for i in b] for b in f(lengths, 4)] for n, f in strategies.items()}
    layouts["packed"] = [rows]
    panel = 0.36 + high * len(lengths) + 0.1 * (len(lengths) // 4)
    fig, ax = drawing.sheet(panel * ((len(layouts) + 1) // 2))
    blue, orange = show.COLOURS["parameters"], show.COLOURS["gradients"]
    for place, (name, batches) in enumerate(layouts.items()):
        left = 0.03 + place % 2 * (drawing.WIDTH / 2 + 0.06)
        y, computed = ax.get_ylim()[1] - place // 2 * panel, 0
        head, y = y - 0.14, y - 0.28
        for batch in batches:
            width = max(sum(lengths[i] for i in row) for row in batch)
            width = limit if name in ("fixed", "packed") else width
            computed += width * len(batch)
            for row in batch:
                at, y = 0, y - high
                pieces = [(lengths[i], blue, f"{i + 1}") for i in row]
                rest = width - sum(lengths[i] for i in row)
                said = name == "fixed" and row == batches[-1][-1]
                pieces += [(rest, orange, "padding" if said else "")] if rest else []
                for size, colour, label in pieces:
                    corner, long = (left + at * inch, y), size * inch - 0.02
                    drawing.block(ax, corner, (long, high - 0.03), colour, label, fontsize=10)
                    at += size
            y -= 0.1
        empty = 1 - sum(lengths) / computed
        drawing.say(ax, left, head, f"{name}: {empty:.0%} padding", weight="bold")
    return fig


def losses_by_strategy(results: Mapping[str, Sequence[float]]):
    """Draw the validation losses of each strategy's seeds, with their mean."""
    fig, ax = show.figure(6, 2.6)
    for name, losses in results.items():
        ax.plot([name] * len(losses), losses, "o", color="#0072b2")
        ax.plot(name, statistics.fmean(losses), "_", color="C1", ms=28, mew=2)
    ax.margins(x=0.2)
    ax.set_ylabel("validation loss, nats")


# ---------------------------------------------------------------- counting


def plans(lengths, strategies: Mapping[str, Strategy], rows: Batches, limit: int, size: int):
    """Plan -> (rows, width) of each batch; packed rows come as many as hold about `size` texts."""
    sizes = [min(size, len(lengths) - at) for at in range(0, len(lengths), size)]
    found = {"fixed": [(n, limit) for n in sizes]}
    for name, strategy in strategies.items():
        batches = strategy(lengths, size)
        found[name] = [(len(b), max(lengths[i] for i in b)) for b in batches]
    together = max(1, round(size * len(rows) / len(lengths)))
    packed = [min(together, len(rows) - i) for i in range(0, len(rows), together)]
    return found | {"packed": [(n, limit) for n in packed]}


def plan_table(plans: Mapping[str, Sequence[tuple[int, int]]], peaks, needed: int) -> pd.DataFrame:
    """A row a plan, a list of (rows, width): padding as a share, peak of its worst batch, tokens.

    peaks: (rows, width) -> Footprint, where there is one. needed: tokens of the texts.
    """
    rows = {}
    for name, plan in plans.items():
        tokens, worst = sum(r * w for r, w in plan), max(plan, key=np.prod)
        peak = peaks[worst].peak_allocated / MiB if worst in peaks else float("nan")
        rows[name] = {"padding": 1 - needed / tokens, "peak, MiB": peak}
        rows[name] |= {"worst batch": "{} x {}".format(*worst), "tokens": tokens}
    return pd.DataFrame(rows).T


def saved(lengths: Sequence[int], strategy: Strategy, fixed: int, size: int) -> float:
    """Share of the tokens of a fixed length that a strategy saves, each batch as its longest."""
    cut = [min(n, fixed) for n in lengths]
    tokens = sum(len(b) * max(cut[i] for i in b) for b in strategy(cut, size))
    return 1 - tokens / (fixed * len(cut))


def saved_by_source(lengths: Mapping[str, Sequence[int]], strategy: Strategy) -> dict[str, list]:
    """Source -> shares saved of fixed lengths of 512 and 2,048 with batches of 8 and 32."""
    grid = [(fixed, size) for fixed in (512, 2048) for size in (8, 32)]
    return {name: [saved(values, strategy, *g) for g in grid] for name, values in lengths.items()}


def memory_of(recipe, card) -> dict | None:
    """What the panel needs: bytes at rest, per token and per pair of tokens, and the card's room.

    None, after a line that says why, for a recipe that the card cannot run.
    """

    def height(rows, width):
        return formula(recipe.but(batch_size=rows, seq_len=width), card).peak_allocated

    corners = [(16, 512), (8, 512), (8, 256)]
    known = [[1, r * w, r * w * w] for r, w in corners]
    try:
        terms = np.linalg.solve(known, [height(*shape) for shape in corners])
    except ValueError as error:
        print(error)
        return None
    found = dict(zip(("fixed", "token", "pair"), terms.tolist(), strict=True))
    how = f"{recipe.precision} with {recipe.attention}"
    what = f"{recipe.model_name} in {how} on a {card.name}"
    return found | {"least": height(1, 8), "room": card.usable, "what": what}


def time_ratios(model, batches: Mapping[str, list], rounds: int = 4) -> pd.DataFrame:
    """A row a name: tokens and time of its batches, as ratios to the first name's.

    Each round runs all names in a new order; the first round warms up. lowest, highest: of rounds.
    """

    def run_through(name):
        for batch in batches[name]:
            model(**batch).square().mean().backward()

    took = {name: [] for name in batches}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(batches), len(batches)):
            took[name].append(seconds(run_through, name))
    frame = pd.DataFrame(took).iloc[1:]
    ratios = frame.div(frame.iloc[:, 0], axis=0)
    tokens = pd.Series({n: sum(b["input_ids"].numel() for b in x) for n, x in batches.items()})
    columns = {"tokens": tokens / tokens.iloc[0], "time": ratios.median()}
    return pd.DataFrame(columns | {"lowest": ratios.min(), "highest": ratios.max()})


# ---------------------------------------------------------------- training


class Reader(torch.nn.Module):
    """A BERT of one narrow layer that reads a class from the mean over a text's own tokens."""

    def __init__(self, vocabulary: int, classes: int, seed: int = 0, positions: int = 512):
        super().__init__()
        sizes = dict(hidden_size=64, num_attention_heads=2, intermediate_size=128)
        sizes |= dict(num_hidden_layers=1, vocab_size=vocabulary)
        sizes["max_position_embeddings"] = max(512, positions)
        whole = models.build(small_config("bert-base-tiny", **sizes), attention="sdpa", seed=seed)
        self.bert = whole.base_model
        self.head = torch.nn.Linear(64, classes)

    def forward(self, input_ids, attention_mask):
        real = attention_mask[..., None]
        x = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state * real
        return self.head(x.sum(1) / real.sum(1))


class Task:
    """From which package a docstring comes: texts cut at 80 tokens, in batches of 16."""

    RATE, CUT, SIZE = 3e-3, 80, 16

    def __init__(self, tokenizer, texts, labels, packages, collate, device):
        self.vocabulary, self.classes = len(tokenizer), len(packages)
        self.collate, self.device = collate, device
        self.texts = [words[: self.CUT] for words in texts]
        self.labels = labels[: len(texts)]
        unseen = corpora.docstrings(packages, "validation").shuffle(seed=0)
        unseen = unseen.select(range(min(500, len(unseen))))
        self.unseen = [t[: self.CUT] for t in tokenizer(unseen["text"][:])["input_ids"]]
        self.truth = torch.tensor(unseen["label"][:])

    def inputs(self, texts, width=None):
        """A batch on the device."""
        return {n: x.to(self.device) for n, x in self.collate(texts, width).items()}

    def learn(self, strategy, seed, epochs=2, width=None, steps=None):
        """A trained reader and the losses of its steps."""
        model, losses = Reader(self.vocabulary, self.classes, seed).to(self.device), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.RATE, fused=True)
        for turn in range(epochs):
            batches = strategy([len(t) for t in self.texts], self.SIZE, 100 * seed + turn)
            for step, batch in enumerate(batches[:steps]):
                done = (turn + step / len(batches)) / epochs
                optimizer.param_groups[0]["lr"] = self.RATE * (1 - done)
                scores = model(**self.inputs([self.texts[i] for i in batch], width))
                named = torch.tensor([self.labels[i] for i in batch], device=self.device)
                loss = functional.cross_entropy(scores, named)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return model, losses

    @torch.no_grad()
    def judge(self, model) -> float:
        """Mean loss on texts that were not trained on, nats."""
        parts = [self.inputs(self.unseen[i : i + 50]) for i in range(0, len(self.unseen), 50)]
        scores = torch.cat([model(**part).cpu() for part in parts])
        return functional.cross_entropy(scores, self.truth).item()

    def results(self, strategies: Mapping[str, Strategy], seeds: Iterable[int]) -> pd.DataFrame:
        """The loss that `judge` finds, a column a strategy and a row a seed."""
        rows = [
            {
                name: self.judge(self.learn(strategy, seed)[0])
                for name, strategy in strategies.items()
            }
            for seed in Progress(seeds)
        ]
        return pd.DataFrame(rows)


class Paragraphs:
    """A small GPT-2 on paragraphs of this book's pages, padded to 64: labels right, and a copy."""

    def __init__(self, pages: Sequence[str], device):
        self.tokenizer, self.device = corpora.tokenizer(pages, vocab_size=512, kind="bpe"), device
        self.texts = [p for page in pages for p in page.split("\n\n") if p.strip()][:400]
        fit = dict(padding="max_length", truncation=True, max_length=64, return_tensors="pt")
        pieces = self.tokenizer(self.texts, **fit)
        self.words, self.real = pieces["input_ids"], pieces["attention_mask"] == 1
        self.labels = {"counted": self.words, "-100": self.words.masked_fill(~self.real, -100)}

    def model(self, seed: int):
        """A GPT-2 of one narrow layer, without dropout."""
        sizes = dict(n_embd=48, n_layer=1, vocab_size=len(self.tokenizer))
        config = small_config("gpt2-tiny", **sizes)
        return models.build(config, attention="sdpa", seed=seed).to(self.device)

    def gradient(self, kind: str) -> torch.Tensor:
        """Of the first batch, flat."""
        model, given = self.model(seed=0), (self.words[:8], self.labels[kind][:8])
        ids, labels = (x.to(self.device) for x in given)
        model(ids, labels=labels).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def off(self) -> float:
        """How far the gradient of the copy is from the right one, relative to that."""
        right, wrong = self.gradient("-100"), self.gradient("counted")
        return ((wrong - right).norm() / right.norm()).item()

    def write(self, kind: str, seed: int, steps: int = 30) -> tuple[float, float]:
        """(loss that training reports at its end, loss on real tokens of unseen paragraphs)."""
        model = self.model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
        given = {"input_ids": self.words, "labels": self.labels[kind]}
        given = {name: x.to(self.device) for name, x in given.items()}
        order = torch.randperm(360, generator=torch.Generator().manual_seed(seed))
        parts = order[: 8 * steps].split(8)
        reported = train_on(model, optimizer, [{n: x[p] for n, x in given.items()} for p in parts])
        labels = self.labels["-100"][360:].to(self.device)
        with torch.no_grad():
            unseen = model(given["input_ids"][360:], labels=labels).loss.item()
        return statistics.fmean(reported[-10:]), unseen

    def ends_learned(self, pad_token: str) -> int:
        """How many of four ends of text keep a label in the language models' collator."""
        other = corpora.tokenizer(self.texts, vocab_size=512, kind="bpe")
        other.pad_token = pad_token
        collator = DataCollatorForLanguageModeling(other, mlm=False)
        batch = collator([other(p) for p in self.texts[:4]])
        return int((batch["labels"] == other.eos_token_id).sum())


@torch.no_grad()
def moved(config, device, amount: int = 108) -> dict[str, float]:
    """How far a text's class scores move, relative to their size, with padding behind it."""
    model = models.build(config, attention="sdpa").eval().to(device)
    text = torch.randint(1000, (1, 20), device=device)
    scores, found = model(input_ids=text).logits, {}
    for kind, real in (("no mask", 1), ("mask", 0)):
        mask = functional.pad(torch.ones_like(text), (0, amount), value=real)
        ids = functional.pad(text, (0, amount))
        difference = model(input_ids=ids, attention_mask=mask).logits - scores
        found[kind] = float(difference.norm() / scores.norm())
    return found


def with_a_long_one(texts: Sequence[list[int]]) -> list[list[int]]:
    """383 texts of at most 128 tokens, and behind them one of 512."""
    return [*[words for words in texts if len(words) <= 128][:383], max(texts, key=len)[:512]]


def survived(texts: Sequence[list[int]], batches: Batches, tokenizer) -> tuple[int, str]:
    """(batches of an ordinary loop of DistilBERT that fit a T4, what it says then)."""
    collate, done = DataCollatorWithPadding(tokenizer), 0
    try:
        with SimulatedGPU("T4"):
            model = models.build("distilbert", attention="sdpa").to("cuda")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
            for batch in Progress(batches):
                rows = [{"input_ids": texts[i], "labels": 0} for i in batch]
                train_step(model, optimizer, collate(rows).to("cuda"))
                done += 1
    except torch.OutOfMemoryError as error:
        return done, str(error).split(". GPU")[0]
    return done, "the whole epoch"
