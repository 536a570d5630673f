"""Mixed precision: published runs, what autocast gives and keeps, speeds, bytes at rest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from memlab import models
from memlab.book import show
from memlab.book.chapters.amp_training import reader
from memlab.book.lessons import QUIET, trainer_losses
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import find_records
from memlab.footprint import Footprint
from memlab.predict.formula import formula
from memlab.predict.measure import Measurement, measure, pick_device
from memlab.predict.simulate import simulate
from memlab.spec.recipe import Recipe
from memlab.units import MiB
from memlab.workloads.training import Training

PUBLISHED = {
    "4 at once": "vanilla",
    "4 at once, fp16": "fp16",
    "one by one": "accumulation, checkpointing",
    "one by one, fp16": "accumulation, checkpointing, fp16",
}
BLUE, ORANGE = (show.COLOURS[n] for n in ("parameters", "gradients"))


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def published_runs() -> pd.DataFrame:
    """Four printed runs of BERT-large on a V100: MiB of the card, and seconds of the run."""
    printed = {run.name: run.figures for run in find_records("published")}
    used = {name: printed[run]["device_used_bytes"] / MiB for name, run in PUBLISHED.items()}
    took = {name: printed[run]["run_seconds"] for name, run in PUBLISHED.items()}
    return pd.DataFrame({"MiB": used, "seconds": took})


def published_bars(runs: pd.DataFrame) -> Figure:
    """`published_runs` as bars with their seconds."""
    fig, ax = show.figure(4.8, 2.6)
    ax.barh(runs.index, runs["MiB"] / 1024, color=[ORANGE, BLUE] * 2)
    for y, (used, took) in enumerate(zip(runs["MiB"], runs["seconds"], strict=True)):
        ax.text(used / 1024, y, f" {used:,.0f} MiB, {took:.0f} s", va="center")
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="GiB of the card", xlim=(0, 26))
    return fig


def formats_given() -> dict[str, list[str]]:
    """Formats that each kind of module gives under fp16 autocast on a simulated T4.

    With those of the loss and of every `.grad`. The model is BERT-large's tiny twin.
    """
    gave: dict[str, set[torch.dtype]] = {}
    with SimulatedGPU("T4"):
        model = models.build("bert-large-tiny").to("cuda")
        for module in model.modules():
            if not list(module.children()):
                heard = gave.setdefault(type(module).__name__, set())
                module.register_forward_hook(
                    lambda module, given, out, heard=heard: heard.add(out.dtype)
                )
        words = torch.ones(1, 16, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(input_ids=words, labels=words[:, 0]).loss
        loss.backward()
        gave["the loss"] = {loss.dtype}
        gave["every .grad"] = {p.grad.dtype for p in model.parameters()}
    return {kind: sorted(map(_named, formats)) for kind, formats in gave.items()}


def formats_by_operation(heard: Mapping[str, Mapping[str, set[str]]]) -> pd.DataFrame:
    """What comes out of a BERT's operations under autocast: a row an operation, a column a device.

    heard: device -> formats by the operation's name.
    """
    named = {"embedding": "look up a word", "addmm": "linear layer"}
    named |= {"bmm": "attention's two products", "_softmax": "softmax"}
    named |= {"gelu": "GELU", "add": "residual: 16-bit plus fp32"}
    named |= {"native_layer_norm": "layer norm", "tanh": "tanh"}
    named |= {"_log_softmax": "loss, first half", "nll_loss_forward": "loss"}
    columns = {
        device: [", ".join(sorted(gives.get(op, ()))) for op in named]
        for device, gives in heard.items()
    }
    return pd.DataFrame(columns, named.values())


def first_saving_batch(recipe: Recipe) -> int:
    """The smallest batch at which fp16 autocast has the lower peak than the recipe in fp32."""
    for batch in range(1, 100):
        full = recipe.but(batch_size=batch, precision="fp32")
        if formula(full.but(precision="fp16-amp")).peak_allocated < formula(full).peak_allocated:
            return batch
    raise ValueError("recipe: fp16 saves at none of 1 to 99 sequences")


def activations_of(line: Sequence[Footprint]) -> tuple[int, int]:
    """(bytes at any batch, bytes of each sequence) of a line's activations at its peaks.

    line: Footprints of one recipe with 1 and 2 sequences first.
    """
    at_1, at_2 = (footprint.breakdown["activations"] for footprint in line[:2])
    return 2 * at_1 - at_2, at_2 - at_1


def predicted_and_measured(recipe: Recipe) -> dict[str, tuple[Footprint, Measurement]]:
    """The recipe in four precisions, simulated and measured; without those a card does not have."""
    pairs = {}
    for precision in ("fp32", "fp16-amp", "bf16-amp", "bf16"):
        try:
            each = recipe.but(precision=precision)
            pairs[precision] = simulate(each), measure(each, steps=1)
        except ValueError as error:  # a T4 and bf16
            print(error)
    return pairs


def speeds() -> pd.DataFrame:
    """BERT-large, 8 sequences, on two cards: estimated samples a second, and times those of fp32.

    The samples are three columns, slow, expected and fast: the range of the estimate. Rows: (card,
    format).
    """
    recipe = Recipe("bert-large", None, 8, attention="sdpa", optimizer="adamw_torch_fused")
    rows = {}
    for card in ("T4", "A100-80GB"):
        for name in ("fp32", "fp16-amp"):
            time = simulate(recipe.but(precision=name), card).step_seconds
            ends = ("slow", time.high), ("samples/s", time.expected), ("fast", time.low)
            rows[card, name] = {end: 8 / seconds for end, seconds in ends}
    frame = pd.DataFrame(rows).T
    of_fp32 = frame["samples/s"].unstack()["fp32"]
    frame["times fp32"] = frame["samples/s"].div(of_fp32, level=0)
    return frame


def bytes_at_rest(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: Iterable[torch.Tensor] = ()
) -> dict[str, tuple[float, str]]:
    """(bytes a parameter, format) of weights, gradients, AdamW's moments and a master's copies."""
    weights = list(model.parameters())
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    groups = {"weights": weights, "gradients": [p.grad for p in weights], "states": moments}
    groups["master"] = list(masters)
    count = sum(p.numel() for p in weights)
    return {
        kind: (sum(t.nbytes for t in some) / count, "+".join({_named(t.dtype) for t in some}))
        for kind, some in groups.items()
        if some
    }


def recipe_at_rest(recipe: Recipe) -> dict[str, tuple[float, str]]:
    """`bytes_at_rest` of a recipe after two steps; it keeps its gradients (`set_to_none=False`)."""
    training = Training(recipe, pick_device())
    training.step(), training.step()
    return bytes_at_rest(training.model, training.optimizer)


def master_at_rest(make: Callable[..., Any], rows: torch.Tensor) -> dict[str, tuple[float, str]]:
    """`bytes_at_rest` of a bf16 reader whose master's optimizer has stepped twice.

    make: the master, from a model and a rate, with `adamw` and fp32 copies `high`.
    """
    model = reader().bfloat16()
    master = make(model, lr=1e-3)
    for _ in range(2):
        model(input_ids=rows, labels=rows).loss.backward()
        held = [p.grad for p in model.parameters()]
        master.step()
    for p, grad in zip(model.parameters(), held, strict=True):
        p.grad = grad
    return bytes_at_rest(model, master.adamw, master.high)


def trainer_formats(model: torch.nn.Module, rows: torch.Tensor, **switch: bool) -> dict[str, str]:
    """Two steps of a Trainer: format of weights, moments, a linear layer's output; its scaler."""
    from transformers import Trainer, TrainingArguments

    layer, gave = model.transformer.h[0].mlp.c_fc, set()
    hook = layer.register_forward_hook(lambda module, given, out: gave.add(out.dtype))
    data = [dict(input_ids=row, labels=row) for row in rows.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, report_to="none", max_steps=2, **QUIET, **switch)
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer_losses(trainer)
    hook.remove()
    made = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    scaler = trainer.accelerator.scaler
    return {
        "weights": _named(layer.weight.dtype),
        "moments": _named(made.state[layer.weight]["exp_avg"].dtype),
        "linear layer gave": ", ".join(map(_named, gave)),
        "scaler": type(scaler).__name__ if scaler else "none",
    }
