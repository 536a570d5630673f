"""What chapter 9 counts, times and draws: vocabularies of several sizes, Rust beside Python."""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import UnigramTrainer

from memlab import models
from memlab.book import corpora, show
from memlab.book.lessons import QUIET, small_config, train_on, trainer_losses
from memlab.card.device import SimulatedGPU
from memlab.gpus import find_gpu
from memlab.predict.measure import seconds
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB

# ---------------------------------------------------------------- sizes of a vocabulary


def loss_peak(loss_of, entries: int, parts: bool, tokens: int = 4096, hidden: int = 768) -> float:
    """Peak of output layer and loss alone on an A100 in bf16, MiB."""
    with SimulatedGPU(find_gpu("A100-40GB").without_limit()) as gpu:
        how = dict(dtype=torch.bfloat16, device="cuda", requires_grad=True)
        states, table = torch.randn(tokens, hidden, **how), torch.randn(entries, hidden, **how)
        ids = torch.zeros(tokens, dtype=torch.long, device="cuda")
        loss_of(states, table, ids, parts).backward()
    return gpu.footprint.peak_allocated / MiB


def smaller(bpe: Tokenizer, entries: int) -> Tokenizer:
    """A byte-level BPE as it was when it had learned this many entries."""
    merges, vocabulary = json.loads(bpe.to_str())["model"]["merges"], bpe.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.get)[:entries]
    keep = {piece: i for i, piece in enumerate(pieces)}
    kept = [(a, b) for a, b in merges if a + b in keep][: entries - 256]
    cut = Tokenizer(BPE(keep, kept))
    cut.pre_tokenizer = bpe.pre_tokenizer
    return cut


def per_character(bpe: Tokenizer, texts: Sequence[str], sizes: Sequence[int]) -> pd.Series:
    """Tokens for each character of the texts, by the entries of the vocabulary."""
    found = {n: sum(len(e.ids) for e in smaller(bpe, n).encode_batch(texts)) for n in sizes}
    return pd.Series(found) / sum(map(len, texts))


class SameText:
    """Peak of a step of a recipe on the same text, by the vocabulary it is cut with.

    recipe: (entries, seq_len by default) -> Recipe. lengths: entries -> tokens per character; a
    text has as many characters as seq_len tokens of the first vocabulary hold. weight, logit:
    bytes for each number of an entry's row and for each logit.
    """

    def __init__(self, recipe, lengths: pd.Series, weight: int, logit: int):
        self.recipe, self.lengths = recipe, lengths
        self.weight, self.logit = weight, logit
        entries, shape = 2**15, recipe(2**15)
        self.hidden = hidden = shape.model.hidden_size
        self.texts, tokens = shape.batch_size, shape.batch_size * shape.seq_len
        self.characters = shape.seq_len / lengths.iloc[0]  # of each text
        known = simulate(shape)
        alike = known.peak_allocated - entries * (hidden * weight + tokens * logit)
        self.states = (known.parameters - entries * hidden) * 12
        self.layers = (alike - self.states) / tokens  # bytes for a token, without its logits

    def peak(self, entries: int, tokens_a_character: float) -> float:
        """By the formula, bytes."""
        t = self.texts * self.characters * tokens_a_character
        row = self.hidden * self.weight + t * self.logit
        return self.states + entries * row + t * self.layers

    def peaks(self) -> pd.Series:
        """Bytes by entries."""
        return pd.Series({n: self.peak(n, length) for n, length in self.lengths.items()})

    def checked(self, entries: int = 2**13) -> tuple[int, float]:
        """(simulated, by the formula) for one size."""
        short = int(self.characters * self.lengths[entries])
        simulated = simulate(self.recipe(entries, short)).peak_allocated
        return simulated, self.peak(entries, short / self.characters)


def draw_tradeoff(lengths: pd.Series, peaks: pd.Series, checked: Mapping[int, int]):
    """Tokens a character and the peak by the size of the vocabulary; checked: simulated peaks."""
    fig, (left, right) = show.figure(6.4, 2.8, ncols=2)
    left.plot(lengths.index, lengths, "o-", color="#d55e00")
    right.plot(peaks.index, peaks / 2**30, "o-", color="#009e73")
    for entries, peak in checked.items():
        right.plot(entries, peak / 2**30, "x", color=show.GREY, ms=9)
    for ax, name in ((left, "tokens a character"), (right, "peak, GiB")):
        ax.set_xscale("log", base=2)
        ax.set(xlabel="entries", title=name)


# ---------------------------------------------------------------- from text to ids


def draw_pipeline(tokenizer: Tokenizer, text: str):
    """Each step of a tokenizer with a template, its boxes under the characters they came from.

    Where normalizing changes the number of characters, the plain ones share the width evenly.
    """
    drawn, plain = tokenizer.encode(text), tokenizer.normalizer.normalize_str(text)
    words = tokenizer.pre_tokenizer.pre_tokenize_str(plain)
    wide = np.ones(len(text))  # of each character: room for its piece and id
    for (a, b), *labels in zip(drawn.offsets, drawn.tokens, drawn.ids, strict=True):
        if b > a:  # special tokens have no place in the text
            longest = max(len(str(label)) for label in labels)
            wide[a:b] = max(1, 0.85 * longest / (b - a))
    edges = np.append(0, wide.cumsum())
    places, last = [(edges[a], edges[b]) for a, b in drawn.offsets], edges[-1]
    inner = [n for n, (a, b) in enumerate(drawn.offsets) if b > a]
    ends = {True: (-4.5, 0), False: (last, last + 4.5)}  # of the template's tokens
    outer = [at if n in inner else ends[n < min(inner, default=1)] for n, at in enumerate(places)]
    each = list(zip(edges, edges[1:], strict=False))
    even = edges if len(plain) == len(text) else np.linspace(0, last, len(plain) + 1)
    rows = {
        "text": (each, text, "#a6a6a6"),
        "normalized": (list(zip(even, even[1:], strict=False)), plain, "#cc79a7"),
        "words": ([(even[a], even[b]) for _, (a, b) in words], [w for w, _ in words], "#e69f00"),
        "pieces": ([places[n] for n in inner], [drawn.tokens[n] for n in inner], "#56b4e9"),
        "template": (outer, drawn.tokens, "#009e73"),
        "ids": (outer, map(str, drawn.ids), "#d0b020"),
    }
    fig, ax = show.figure(6.4, 3.0)
    for level, (spans, labels, colour) in enumerate(rows.values()):
        for (start, end), label in zip(spans, labels, strict=True):
            ax.barh(-level, end - start - 0.1, left=start, height=0.6, color=colour, alpha=0.9)
            style = dict(ha="center", va="center", color="black", fontsize=8)
            ax.text((start + end) / 2, -level, label, **style)
    ax.set_yticks([-level for level in range(len(rows))], list(rows))
    ax.set(xlim=(-4.5, last + 4.5), xticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def unigram(texts: Sequence[str], entries: int = 600) -> Tokenizer:
    """A Unigram tokenizer learned from texts."""
    learned = Tokenizer(Unigram())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    how = dict(unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    learned.train_from_iterator(texts, UnigramTrainer(vocab_size=entries, **how))
    return learned


# ---------------------------------------------------------------- Rust and Python


def in_python(vocabulary: Mapping[str, int]):
    """BERT's tokenizer written in Python, with this vocabulary."""
    from transformers.models.bert import tokenization_bert_legacy as legacy

    file = Path(tempfile.mkdtemp(), "vocab.txt")
    entries = "\n".join(sorted(vocabulary, key=vocabulary.get)) + "\n"
    file.write_text(entries, encoding="utf-8")
    return legacy.BertTokenizerLegacy(file)


def hostile(count: int, seed: int = 0) -> list[str]:
    """Texts of random characters of all of Unicode; surrogates are no characters."""
    draw = random.Random(seed)
    ranges = [(0, 0x250), (0, 0x3000), (0xE000, 0x110000), (0, 0xD800)]
    return [
        "".join(chr(draw.randrange(*r)) for _ in range(draw.randrange(60)))
        for r in draw.choices(ranges, k=count)
    ]


def equal(one, other, texts: Sequence[str]) -> list[bool]:
    """For each text, whether both tokenizers give the same ids."""
    a, b = (tokenizer(texts)["input_ids"] for tokenizer in (one, other))
    return [x == y for x, y in zip(a, b, strict=True)]


def times_as_fast(rust, python, rounds: int = 8) -> pd.DataFrame:
    """Python's time over that of each way (a row), by characters of a text, interleaved.

    The first round warms up. Python again is the control.
    """

    def one_by_one(tokenizer, some):
        return [tokenizer(one)["input_ids"] for one in some]

    def batch(some, threads):
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads else "false"
        return rust(some)["input_ids"]

    ways = {
        "Python": lambda some: one_by_one(python, some),
        "Python again": lambda some: one_by_one(python, some),
        "Rust": lambda some: one_by_one(rust, some),
        "Rust, batch": lambda some: batch(some, threads=False),
        "Rust, threads": lambda some: batch(some, threads=True),
    }
    stream, before = "\n".join(corpora.pages()["text"]), os.environ.get("TOKENIZERS_PARALLELISM")
    texts = {n: [stream[i : i + n] for i in range(0, 8192, n)] for n in (64, 512, 8192)}
    took = {(n, way): [] for n in texts for way in ways}
    for turn in range(rounds):
        for n, some in texts.items():
            for way in random.Random(turn).sample(list(ways), len(ways)):
                took[n, way].append(seconds(ways[way], some))
    os.environ.pop("TOKENIZERS_PARALLELISM")
    if before is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = before

    def faster(n, way):
        pairs = zip(took[n, "Python"][1:], took[n, way][1:], strict=True)
        return statistics.median(a / b for a, b in pairs)

    return pd.DataFrame({n: [faster(n, way) for way in ways] for n in texts}, index=list(ways))


def three_steps_on(rows, tokenizer, classes: int, device) -> list[float]:
    """Losses of a Trainer's three steps of a BERT of one layer on 48 rows of ids."""
    from transformers import Trainer

    sizes = dict(num_labels=classes, num_hidden_layers=1)
    sizes["max_position_embeddings"] = max(512, *map(len, rows["input_ids"]))
    config = small_config("bert-base-tiny", dropout=0.1, **sizes)
    how = dict(logging_steps=1, num_train_epochs=1, **QUIET)
    arguments = Recipe(config, batch_size=16).training_arguments(tempfile.mkdtemp(), **how)
    model = models.build(config).to(device)
    given = dict(train_dataset=rows, processing_class=tokenizer)
    return trainer_losses(Trainer(model, arguments, **given))


FORKS = """
import os, sys, time, tokenizers
tok = tokenizers.Tokenizer.from_file(sys.argv[1])
tok.encode_batch(["a text"] * 64)      # starts the threads
child = os.fork()
if child == 0:
    tok.encode_batch(["a text"] * 64)
    os._exit(0)
for _ in range(75):
    if os.waitpid(child, os.WNOHANG)[0]:
        sys.exit("the child came back")
    time.sleep(0.02)
os.kill(child, 9)
sys.exit("the child hangs")
"""


def forked(tokenizer: Tokenizer, value: str | None) -> str:
    """What becomes of a child that tokenizes, by the value of TOKENIZERS_PARALLELISM."""
    folder = Path(tempfile.mkdtemp())
    (folder / "fork.py").write_text(FORKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    if value is not None:
        environment["TOKENIZERS_PARALLELISM"] = value
    command = [sys.executable, folder / "fork.py", folder / "tokenizer.json"]
    how = dict(env=environment, capture_output=True, text=True)
    return subprocess.run(command, **how).stderr.strip().splitlines()[-1]


# ---------------------------------------------------------------- bits a character


def bits(coder: Tokenizer, texts: Sequence[str], unseen: Sequence[str], seed: int, device):
    """(loss a token, bits a character) of a tiny GPT-2 on unseen texts; it read the others."""

    def blocks_of(some):
        ids = torch.tensor(coder.encode("\n".join(some)).ids, device=device)
        return ids[: len(ids) // 64 * 64].view(-1, 64), len(ids)

    sizes = dict(vocab_size=coder.get_vocab_size(), n_embd=64, bos_token_id=0, eos_token_id=0)
    config = small_config("gpt2-tiny", dropout=0.1, **sizes)
    model = models.build(config, attention="sdpa", seed=seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    blocks, _ = blocks_of(texts)
    train_on(model, optimizer, blocks[torch.randperm(len(blocks))].split(8))
    rows, tokens = blocks_of(unseen)
    with torch.no_grad():
        loss = model.eval()(input_ids=rows, labels=rows).loss.item()
    return loss, loss * tokens / len("\n".join(unseen)) / np.log(2)


def bits_table(coders: Mapping[int, Tokenizer], texts, unseen, device) -> pd.DataFrame:
    """A row a vocabulary: `bits` of three seeds, their mean and the range of the bits."""
    rows = {}
    for entries, coder in coders.items():
        runs = [bits(coder, texts, unseen, seed, device) for seed in range(3)]
        token, character = zip(*runs, strict=True)
        rows[f"{entries:,}"] = {
            "bits a character": statistics.fmean(character),
            "lowest": min(character),
            "highest": max(character),
            "loss a token": statistics.fmean(token),
        }
    return pd.DataFrame(rows).T
