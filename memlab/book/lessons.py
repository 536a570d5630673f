"""Helpers around the training loops of the chapters: small models, text, losses, timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from memlab import models
from memlab.book import corpora
from memlab.predict.measure import seconds
from memlab.predict.progress import Progress
from memlab.trace.tracer import Tracer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast, Trainer

    from memlab.evidence.records import Record
    from memlab.footprint import Footprint
    from memlab.workloads.training import Training

DROPOUTS = "resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob"
# Arguments for a Trainer that prints and stores nothing. Without a GPU, pinned memory has no use,
# and PyTorch would warn about it.
QUIET: dict[str, Any] = dict(disable_tqdm=True, save_strategy="no", log_level="error")
QUIET["dataloader_pin_memory"] = torch.cuda.is_available()


def small_config(name: str, dropout: float = 0.0, **sizes: object) -> PretrainedConfig:
    """The config of a model of the catalogue with other sizes, and with one value for each dropout.

    Raises ValueError for a size that the config does not have.
    """
    config = models.config(name)
    dropouts = {field: dropout for field in DROPOUTS.split() if hasattr(config, field)}
    for field, value in (dropouts | sizes).items():
        if not hasattr(config, field):
            raise ValueError(f"{field} is not a size of {name}: allowed are fields of its config")
        setattr(config, field, value)
    return config


def shuffled_blocks(length: int) -> tuple[PreTrainedTokenizerFast, torch.Tensor]:
    """(tokenizer with 512 entries, token ids of shape [blocks, length]) of this book's pages.

    The blocks are shuffled in an order that is always the same. This seeds torch's global generator
    with 0.
    """
    texts = corpora.pages()["text"]
    tokenizer = corpora.tokenizer(texts, vocab_size=512, kind="bpe")
    blocks = corpora.language_model_blocks(texts, tokenizer, length)
    ids = blocks.with_format("torch")["input_ids"][:]
    torch.manual_seed(0)
    return tokenizer, ids[torch.randperm(len(ids))]


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]
) -> float:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train_on(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Mapping[str, torch.Tensor] | torch.Tensor],
    rates: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[float]:
    """Train one step on each batch and return the losses.

    batches: dictionaries, or token ids of shape [batch, length], which serve as labels too.
    rates: a learning-rate scheduler, stepped after each batch.
    """
    losses = []
    for batch in Progress(batches):
        given = {"input_ids": batch, "labels": batch} if torch.is_tensor(batch) else batch
        losses.append(train_step(model, optimizer, given))
        if rates is not None:
            rates.step()
    return losses


def three_steps(
    training: Training, step: Callable[[], float] | None = None
) -> tuple[list[float], Footprint]:
    """(losses of three optimizer steps, `Footprint` of the third), with the same dropout each time.

    step: another loop over the model, in place of the training's own.

    The third step is traced on a GPU too, because only its tensors are comparable between two
    loops. The allocator's counters would include everything else on the GPU. They would also count
    a cached block that is up to 1 MiB larger than the request.
    """
    step = step or training.step
    torch.manual_seed(1)  # the seed of the dropout
    losses = [step(), step()]
    tracer = Tracer()
    tracer.watch(training.model, training.optimizer, training.inputs)
    with tracer:
        losses.append(step())
    return losses, tracer.footprint()


def trainer_losses(trainer: Trainer) -> list[float]:
    """Train with a transformers Trainer, without its output, and return the logged losses."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def estimated_run(run: Record, footprint: Footprint) -> tuple[str, bool]:
    """(a sentence that compares a published run's seconds with the estimate, whether they fit it).

    run: a record with `run_seconds` and `samples_per_second`.
    footprint: the footprint of the run's recipe, simulated on the run's GPU.

    Known limitation: the seconds of a run include reading the data; the estimate does not.
    """
    time, figures = footprint.step_seconds, run.figures
    steps = figures["run_seconds"] * figures["samples_per_second"] / time.samples
    low, expected, high = (steps * bound for bound in (time.low, time.expected, time.high))
    printed = figures["run_seconds"]
    guess = f"{expected:.0f} ({low:.0f} to {high:.0f}, by what kernels reach on that card)"
    sentence = f"the printed {printed:.0f} s, not measured again, are estimated at {guess}"
    return sentence, low <= printed <= high


def in_turns(runs: Mapping[str, Callable[[], object]], rounds: int) -> pd.DataFrame:
    """Time the runs in turns: seconds of each run (column) in each round (row).

    A moment in which the machine is slow then affects all runs, not just one.
    """
    turns = Progress(range(rounds))
    return pd.DataFrame([{name: seconds(run) for name, run in runs.items()} for _ in turns])
