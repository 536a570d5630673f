"""A small BERT that is pretrained on docstrings and learns a near and a far task, frozen or not."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer

from memlab import models
from memlab.book import corpora, show
from memlab.book.lessons import QUIET, small_config, train_on, trainer_losses
from memlab.predict.measure import pick_device
from memlab.spec.recipe import Recipe

Data = tuple[torch.Tensor, torch.Tensor]  # token ids [texts, 16] and labels [texts]
KNOWN = ["torch", "transformers", "numpy", "pandas"]  # packages of the pretraining


@cache
def _texts() -> dict[str, list[str]]:
    """Docstrings of 16 words or more by their package, in an order that is always the same."""
    corpus = corpora.docstrings(split="all", min_words=16)
    names = corpus.features["label"].names
    of: dict[str, list[str]] = {name: [] for name in names}
    for label, words in zip(corpus["label"], corpus["text"], strict=True):
        of[names[label]].append(words)
    for texts in of.values():
        random.Random(0).shuffle(texts)
    return of


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    read = [words for name in KNOWN for words in _texts()[name][:500]]
    return corpora.tokenizer(read, vocab_size=2000)


def _examples(groups: Sequence[Sequence[str]], begin: int, end: int) -> Data:
    """Texts begin to end of each package, cut at 16 tokens; the label is the package's group."""
    rows = [
        (words, label)
        for label, group in enumerate(groups)
        for name in group
        for words in _texts()[name][begin:end]
    ]
    random.Random(0).shuffle(rows)
    texts, labels = zip(*rows, strict=True)
    cut = dict(truncation=True, max_length=16, return_tensors="pt")
    ids = _tokenizer()(list(texts), **cut)["input_ids"]
    return ids.to(pick_device()), torch.tensor(labels, device=pick_device())


def tasks() -> dict[str, tuple[Data, Data]]:
    """(to learn from, unseen) of three tasks, all of them to tell where a docstring is from.

    packages: which of the four `KNOWN` ones. near: from one of their first two or of the others.
    far: which of two packages that neither the pretraining nor the tokenizer has read.
    """
    each, pairs = [[name] for name in KNOWN], [KNOWN[:2], KNOWN[2:]]
    far = [["datasets"], ["matplotlib"]]
    return {
        "packages": (_examples(each, 0, 900), _examples(each, 900, 1000)),
        "near": (_examples(pairs, 900, 950), _examples(pairs, 950, 1050)),
        "far": (_examples(far, 0, 100), _examples(far, 100, 300)),
    }


def reader(labels: int, seed: int = 0) -> PreTrainedModel:
    """A BERT of three layers, 48 wide, without dropout, which tells some labels apart."""
    sizes = dict(num_hidden_layers=3, num_attention_heads=4)
    sizes |= dict(hidden_size=48, intermediate_size=192)
    sizes |= dict(vocab_size=len(_tokenizer()), num_labels=labels)
    config = small_config("bert-large-tiny", **sizes)
    return models.build(config, attention="sdpa", seed=seed).to(pick_device())


def fit(
    model: PreTrainedModel,
    data: Data,
    steps: int,
    seed: int = 0,
    size: int = 32,
    optimizer: torch.optim.Optimizer | None = None,
) -> PreTrainedModel:
    """The model after some steps on random batches; without an optimizer AdamW moves what trains.

    seed: of the batches. size: texts of each.
    """
    torch.manual_seed(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=2e-3, fused=True)
    ids, labels = data
    chosen = torch.randint(len(ids), (steps, size)).to(ids.device)
    train_on(model, optimizer, [{"input_ids": ids[c], "labels": labels[c]} for c in chosen])
    return model


@torch.no_grad()
def accuracy(model: PreTrainedModel, data: Data) -> float:
    """The share of texts that get their label."""
    ids, labels = data
    return (model(input_ids=ids).logits.argmax(-1) == labels).float().mean().item()


def scores_figure(scores: Mapping[tuple[str, str], Sequence[float]]) -> Figure:
    """Accuracies by (task, what is frozen): the mean and each seed, and where guessing is."""
    names = list(dict.fromkeys(task for task, _ in scores))
    fig, axes = show.figure(5.6, 3, ncols=len(names), sharey=True, squeeze=False)
    for ax, task in zip(axes[0], names, strict=True):
        found = {kind: values for (of, kind), values in scores.items() if of == task}
        for x, values in enumerate(found.values()):
            ax.bar(x, fmean(values), color=show.COLOURS["inputs"])
            ax.plot([x] * len(values), values, "o", color=show.GREY, markersize=5)
        ax.axhline(0.5, color=show.GREY, linestyle="--")
        ax.set(title=f"{task} task", xticks=range(len(found)), ylim=(0, 1))
        ax.set_xticklabels(found, rotation=30)
    axes[0, 0].set(ylabel="accuracy")
    return fig


# ---------------------------------------------------------------- what moves


def _lowest_to_top(layers: Sequence[torch.nn.Module]) -> float:
    """The norm of the lowest layer's gradient over that of the top one's."""
    ends = layers[0], layers[-1]
    low, top = (torch.cat([p.grad.flatten() for p in end.parameters()]).norm() for end in ends)
    return (low / top).item()


def _of_stack(residual: bool) -> float:
    torch.manual_seed(0)
    net = [torch.nn.Linear(48, 48) for _ in range(12)]
    x = torch.randn(32, 48)
    for linear in net:
        x = torch.sigmoid(linear(x)) + (x if residual else 0)
    x.mean().backward()
    return _lowest_to_top(net)


def _of_bert(model: PreTrainedModel, data: Data, texts: int) -> float:
    ids, labels = (column[:texts] for column in data)
    model(input_ids=ids, labels=labels).loss.backward()
    return _lowest_to_top(model.bert.encoder.layer)


def gradients(model: PreTrainedModel, data: Data) -> dict[str, float]:
    """The norm of the lowest layer's gradient over the top one's: of 12 sigmoid layers without and
    with residual connections, of BERT-base with new weights, and of a reader of two labels."""
    base = models.build(small_config("bert-base", num_labels=2)).to(pick_device())
    found = {"plain": _of_stack(residual=False), "residual": _of_stack(residual=True)}
    return found | {"BERT-base": _of_bert(base, data, 8), "reader": _of_bert(model, data, 32)}


def moved_by_layer(model: PreTrainedModel, data: Data) -> list[float]:
    """How far 20 steps of AdamW move each layer's weights, relative to their size."""
    vector = torch.nn.utils.parameters_to_vector

    def weights() -> list[torch.Tensor]:
        return [vector(layer.parameters()).detach() for layer in model.bert.encoder.layer]

    before = weights()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    fit(model, data, 20, optimizer=adamw)
    pairs = zip(before, weights(), strict=True)
    return [((b - a).norm() / a.norm()).item() for a, b in pairs]


def tensors_moved(module: torch.nn.Module, train: Callable[[], object]) -> int:
    """How many weight tensors of a module are others after a training."""
    before = [p.detach().clone() for p in module.parameters()]
    train()
    return sum(not torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))


def held_by_trainer(model: PreTrainedModel, data: Data) -> int:
    """How many weights the optimizer of a transformers Trainer holds after a step."""
    ids, labels = (column.tolist() for column in data)
    rows = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = Recipe("bert-large-tiny").training_arguments(folder, max_steps=1, **QUIET)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer_losses(trainer)
    return sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
