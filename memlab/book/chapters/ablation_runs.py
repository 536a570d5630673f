"""What chapter 15 trains and runs beside its text: a small reader, masks, two scripts."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import PretrainedConfig

from memlab import models
from memlab.book import corpora, show
from memlab.book.lessons import shuffled_blocks, small_config
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import find_gpu
from memlab.predict.formula import formula
from memlab.spec.recipe import Recipe
from memlab.units import MiB
from memlab.workloads.training import Training

GiB = 2**30
STEPS, SEQUENCES = 20, 8
Loop = Callable[[nn.Module, dict[str, torch.Tensor]], float]


Way = Callable[["Reader", int], float]


@dataclasses.dataclass(frozen=True)
class Reader:
    """A GPT-2 of one narrow layer that reads this book's pages, and what it reads.

    seen, unseen: token ids [texts, 32] to train on and to be judged by.
    """

    config: PretrainedConfig
    seen: torch.Tensor
    unseen: torch.Tensor
    rate: float

    def steps(self, seed: int) -> tuple[torch.Tensor, ...]:
        """The batches of one training, the same for every recipe."""
        order = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(self.seen), generator=order)
        return self.seen[rows[: STEPS * SEQUENCES]].split(SEQUENCES)

    def training(self, fields: Mapping[str, Any], seed: int) -> Training:
        """memlab's loop for a recipe of the guide on this model, with twice its sequences."""
        small = dict(model=self.config, task="causal-lm", seq_len=32)
        small["batch_size"] = 2 * fields["batch_size"]
        return Training(Recipe(**(dict(fields) | small)), self.seen.device, seed)

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """The loss of what was not seen."""
        return model.eval()(input_ids=self.unseen, labels=self.unseen).loss.item()

    def by_recipe(
        self,
        fields: Mapping[str, Any],
        seed: int,
        prepare: Callable[[nn.Module], object] = lambda model: None,
    ) -> tuple[list[float], float]:
        """(losses of the steps, loss of unseen text) of one training by a recipe."""
        training = self.training(fields, seed)
        prepare(training.model)
        for group in training.optimizer.param_groups:
            group["lr"] = self.rate
        losses = []
        for rows in self.steps(seed):
            pieces = rows.split(training.recipe.batch_size)
            training.batches = [dict(input_ids=ids, labels=ids) for ids in pieces]
            losses.append(training.step())
        return losses, self.loss(training.model)

    def by_loop(
        self, prepare: Callable[[nn.Module], object], one_pass: Loop, seed: int
    ) -> tuple[list[float], float]:
        """The same, by a loop of the page: checkpoints, sdpa, and the whole batch at once."""
        fields = dict(batch_size=4, attention="sdpa", checkpointing="non-reentrant")
        model = self.training(fields, seed).model
        prepare(model)
        batches = ({"input_ids": rows, "labels": rows} for rows in self.steps(seed))
        return [one_pass(model, batch) for batch in batches], self.loss(model)


def reader(device: str | torch.device, rate: float) -> Reader:
    """The reader and its texts on a device; rate is the learning rate."""
    tokenizer, ids = shuffled_blocks(length=32)
    unseen, seen = ids.to(device).split([128, len(ids) - 128])
    shape = dict(n_embd=32, n_layer=1, n_head=2, n_positions=32)
    config = small_config("gpt2-tiny", vocab_size=len(tokenizer), **shape)
    return Reader(config, seen, unseen, rate)


def bert_in_backward(
    attach: Callable[[nn.Module, Any], object], make_optimizer: Any, one_pass: Loop
) -> Footprint:
    """Two steps of BERT-large with checkpoints on a simulated V100, the step inside backward.

    attach: (model, make_optimizer) -> hooks that step each weight.
    """
    with SimulatedGPU("V100") as gpu:
        model = models.build("bert-large", attention="sdpa").to("cuda")
        model.activation_checkpointing_enable({"use_reentrant": False})
        attach(model, make_optimizer)
        ids = torch.ones(4, 512, dtype=torch.long, device="cuda")
        for _ in range(2):
            gpu.reset_peak()
            one_pass(model, {"input_ids": ids, "labels": ids[:, 0]})
    return gpu.footprint


def by_recipes(runs: Mapping[str, Record]) -> dict[str, Way]:
    """Name -> a training by a record's recipe, which gives the loss of unseen text."""
    return {
        name: lambda student, seed, run=run: student.by_recipe(run.recipe, seed)[1]
        for name, run in runs.items()
    }


def in_backward(
    makers: Mapping[str, Any], attach: Callable[[nn.Module, Any], object], one_pass: Loop
) -> dict[str, Way]:
    """The same for a loop whose optimizers, one a weight, step inside the backward pass."""

    def way(make: Any) -> Way:
        def prepare(model: nn.Module) -> None:
            attach(model, make)

        return lambda student, seed: student.by_loop(prepare, one_pass, seed)[1]

    return {f"in backward, {name}": way(make) for name, make in makers.items()}


def pruned(model: nn.Module, share: float = 0.5) -> None:
    """Mask the smallest part of each inner matrix, in place, as PyTorch's own pruning does."""
    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D") and "head" not in name:
            prune.l1_unstructured(module, "weight", share)


def bytes_of_pruning() -> float:
    """What masks add to the peak of a training, bytes a weight, simulated."""

    def peak(layers: int, prepare: Callable[[nn.Module], object]) -> int:
        with SimulatedGPU("H100") as card:
            inner = [nn.Linear(4096, 4096) for _ in range(layers)]
            model = nn.Sequential(*inner).to("cuda")
            prepare(model)
            x = torch.randn(8, 4096, device="cuda")
            adamw = torch.optim.AdamW(model.parameters(), fused=True)
            for _ in range(2):
                card.reset_peak()
                model(x).sum().backward()
                adamw.step()
                adamw.zero_grad()
        return card.footprint.peak_allocated

    masks = peak(4, pruned) - peak(2, pruned)
    none = peak(4, lambda model: None) - peak(2, lambda model: None)
    return (masks - none) / 2 / 4096**2


def empty_table(
    ends: Mapping[str, Sequence[float]], student: Reader, start: Recipe, names: Mapping[str, str]
) -> tuple[pd.DataFrame, float]:
    """(peak of each strategy on an H100 in GiB by `formula`, and the small model's loss; bytes a
    weight that pruning adds).

    ends: losses of the guide's nine recipes over the seeds. start: without any strategy. names:
    model -> the column's word.
    """
    once, extra = {"checkpointing": True}, bytes_of_pruning()
    card = find_gpu("H100").without_limit()
    plain = dict(batch_size=4)
    seeds = range(len(ends["vanilla"]))
    marked = [student.by_recipe(plain | once, seed)[1] for seed in seeds]
    masked = [student.by_recipe(plain, seed, pruned)[1] for seed in seeds]
    strategies = {
        "none": ({}, ends["vanilla"]),
        "accumulation": (dict(batch_size=1, accumulation=4), ends["accumulation"]),
        "checkpointing": (once, marked),
        "mixed precision": (dict(precision="bf16-amp"), ends["fp16"]),
        "pruning": ({}, masked),
        "Adafactor": (dict(optimizer="adafactor"), ends["adafactor"]),
        "8-bit Adam": (dict(optimizer="adamw_8bit"), ends["8-bit adam"]),
    }
    rows: dict[str, dict[str, float | None]] = {}
    for strategy, (fields, losses) in strategies.items():
        rows[strategy] = {}
        for model, name in names.items():
            run = formula(start.but(model=model, **fields), card)
            adds = extra * (run.parameters or 0) if strategy == "pruning" else 0
            rows[strategy][f"{name} GiB"] = (run.peak_allocated + adds) / GiB
        rows[strategy]["loss"] = statistics.fmean(losses)
    rows["TensorRT"] = dict.fromkeys(rows["none"])
    return pd.DataFrame(rows).T.astype(float), extra


def two_scripts(fields: Mapping[str, Any], gpu: str) -> dict[str, Footprint]:
    """Two steps of the Trainer's and of Accelerate's script for a recipe of BERT-large, at full
    width and two layers, on a simulated card."""
    from IPython.utils.capture import capture_output

    from memlab.export.training_script import training_script
    from memlab.predict.script import run_script

    found = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        few = small_config("bert-large", num_hidden_layers=2, vocab_size=512)
        models.build(few).save_pretrained("model")
        words = ["some text of a few words " * 20]
        corpora.tokenizer(words, 512, "wordpiece").save_pretrained("model")
        two_layers = Recipe(**(dict(fields) | {"model": str(Path("model").resolve())}))
        two_layers = two_layers.but(set_to_none=True)
        for api in ("trainer", "accelerate"):
            Path(f"{api}.py").write_text(training_script(two_layers, api))
            with capture_output():  # their losses, the Trainer's bar
                found[api] = run_script(f"{api}.py", gpu=gpu, steps=2).footprint
    return found


def speeds(plain: Footprint, start: Recipe, makers: Mapping[str, Any]) -> dict[str, float]:
    """How many times as fast as plain training steps with checkpoints, fp16 and sdpa are.

    makers: names of optimizers such as "8-bit Lion"; of others there is no estimate. None knows a
    step inside backward.
    """
    goal = start.but(precision="fp16-amp", attention="sdpa", checkpointing=True)
    fields = {"8-bit AdamW": "adamw_8bit", "Adafactor": "adafactor", "8-bit Lion": "lion_8bit"}
    card = find_gpu("V100").without_limit()
    found = {}
    for name in fields.keys() & makers.keys():
        time = formula(goal.but(optimizer=fields[name]), card).step_seconds
        found[name] = plain.step_seconds.expected / time.expected
    return found


def in_backward_table(
    runs: Mapping[str, Footprint],
    share: Callable[..., float],
    context: int,
    faster: Mapping[str, float],
) -> pd.DataFrame:
    """MiB and shares of plain training of steps inside backward, with two contexts.

    share: (footprint, bytes of a context) -> of plain training; without one, the guide's context.
    faster: how many times as fast, given as a range.
    """
    rows = {
        name: {
            "MiB": ((run.peak_reserved or 0) + context) / MiB,
            "% of plain": 100 * share(run, context),
            "%, guide's context": 100 * share(run),
            "times as fast": show.ratio_between(faster[name]) if name in faster else "—",
        }
        for name, run in runs.items()
    }
    return pd.DataFrame(rows).T.infer_objects()
