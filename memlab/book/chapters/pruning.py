"""Small models that are pruned, and what is left of their bytes and of what they have learnt."""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pandas as pd
import torch
from torch.nn.utils import prune

from memlab.book.chapters.patients import Patients, linears

Way = Callable[[torch.nn.Module], object]


def smallest(model: torch.nn.Module) -> None:
    """Four fifths of each matrix become zero, wherever they stand."""
    for layer in linears(model).values():
        prune.l1_unstructured(layer, "weight", amount=0.8)


def two_of_four(model: torch.nn.Module) -> None:
    """Of each four neighbours the two largest stay: 2:4."""
    for layer in linears(model).values():
        fours = layer.weight.detach().abs().reshape(-1, 4)
        kept = fours.topk(2, dim=1).indices
        mask = torch.zeros_like(fours).scatter_(1, kept, 1.0)
        prune.custom_from_mask(layer, "weight", mask.reshape_as(layer.weight))


def narrow(model: torch.nn.Module) -> None:
    """Half of the feed-forward neurons are taken out for real."""
    for block in model.model.layers:
        mlp = block.mlp
        size = mlp.down_proj.weight.norm(dim=0)
        kept = size.topk(len(size) // 2).indices.sort().values
        for layer in (mlp.gate_proj, mlp.up_proj):
            layer.weight = torch.nn.Parameter(layer.weight.data[kept])
        down = mlp.down_proj
        down.weight = torch.nn.Parameter(down.weight.data[:, kept])


def one_layer(model: torch.nn.Module) -> None:
    model.model.layers = model.model.layers[:1]


WAYS: dict[str, Way] = {"as trained": lambda model: None, "80 %, the smallest": smallest}
WAYS |= {"2:4": two_of_four, "half of the neurons": narrow, "one layer of two": one_layer}


class Cured(NamedTuple):
    """Loss after pruning and after retraining; bytes of the tensors with masks, then without, and
    of the file; the model."""

    after: float
    again: float
    with_masks: int
    memory: int
    file: int
    model: torch.nn.Module


def stored(model: torch.nn.Module) -> tuple[int, int]:
    """(bytes of tensors, bytes of the file that torch.save writes)."""
    state = model.state_dict()
    unique = {t.data_ptr(): t.nbytes for t in state.values()}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, path := os.path.join(folder, "model.pt"))
        return sum(unique.values()), os.path.getsize(path)


def cure(patients: Patients, way: Way, seed: int, steps: int = 12) -> Cured:
    """Prune one of the models, retrain it for some steps, and drop the masks."""
    model = copy.deepcopy(patients.models[seed])
    way(model)
    after, with_masks = patients.loss(model), stored(model)[0]
    again = patients.loss(patients.taught(model, steps, 2e-3, 10 + seed))
    for layer in linears(model).values():
        if prune.is_pruned(layer):
            prune.remove(layer, "weight")
    return Cured(after, again, with_masks, *stored(model), model)


def table(cured: Mapping[str, list[Cured]]) -> pd.DataFrame:
    """KiB, and the losses as mean ± spread over the seeds."""

    def shown(values: list[float]) -> str:
        mean = f"{statistics.fmean(values):.3f}"
        return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean

    rows = {
        name: {
            "tensors, KiB": f"{runs[0].memory / 1024:,.0f}",
            "file, KiB": f"{runs[0].file / 1024:,.0f}",
            "loss after": shown([run.after for run in runs]),
            "retrained": shown([run.again for run in runs]),
        }
        for name, runs in cured.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def more_than_unpruned(cured: Mapping[str, list[Cured]]) -> float:
    """The largest mean loss after retraining, over that of the unpruned models' same steps."""
    control = [run.again for run in cured["as trained"]]
    return max(
        statistics.fmean(run.again - c for run, c in zip(runs, control, strict=True))
        for runs in cured.values()
    )


def in_csr(share: float) -> float:
    """Bytes of a matrix with a share of zeros in CSR, over the dense ones."""
    layer = torch.nn.Linear(256, 256, bias=False)
    prune.l1_unstructured(layer, "weight", amount=share)
    sparse = layer.weight.detach().to_sparse_csr()
    parts = sparse.values(), sparse.col_indices(), sparse.crow_indices()
    return sum(part.nbytes for part in parts) / layer.weight.nbytes
