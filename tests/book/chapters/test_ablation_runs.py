"""What chapter 15 trains: the same samples for every way, ways that only cut the batch, masks."""

import pytest
import torch

from memlab import Recipe, models
from memlab.book.chapters import ablation_runs
from memlab.evidence.records import find_records


@pytest.fixture(scope="module")
def student():
    return ablation_runs.reader("cpu", rate=1e-2)


@pytest.fixture(scope="module")
def nine():
    return {run.name: run.recipe for run in find_records("published", "V100")}


def test_each_way_sees_the_same_samples(student):
    one, other = (torch.cat(student.steps(seed)) for seed in (0, 1))
    assert one.shape == (ablation_runs.STEPS * ablation_runs.SEQUENCES, 32)
    assert torch.equal(one, torch.cat(student.steps(0))) and not torch.equal(one, other)


def test_ways_that_only_cut_the_batch_learn_the_same(student, nine, monkeypatch):
    monkeypatch.setattr(ablation_runs, "STEPS", 4)
    plain, plain_end = student.by_recipe(nine["vanilla"], 1)
    for name in ("accumulation", "accumulation, checkpointing"):
        losses, end = student.by_recipe(nine[name], 1)
        assert losses == pytest.approx(plain, abs=1e-4)
        assert end == pytest.approx(plain_end, abs=1e-3)
    assert plain[-1] < plain[0] - 0.05


def test_a_loop_of_the_page_that_steps_after_backward_is_the_recipes(student, monkeypatch):
    monkeypatch.setattr(ablation_runs, "STEPS", 3)
    held = {}

    def attach(model, make):
        held["adamw"] = make(model.parameters())

    def one_pass(model, batch):
        loss = model(**batch).loss
        loss.backward()
        held["adamw"].step()
        held["adamw"].zero_grad()
        return loss.item()

    def make(weights):
        return torch.optim.AdamW(weights, student.rate)

    (way,) = ablation_runs.in_backward({"AdamW": make}, attach, one_pass).values()
    fields = dict(batch_size=4, attention="sdpa", checkpointing="non-reentrant")
    assert way(student, 2) == pytest.approx(student.by_recipe(fields, 2)[1], abs=2e-3)


def test_pruning_masks_half_of_each_inner_matrix(student):
    model = models.build(student.config, seed=3)
    ablation_runs.pruned(model)
    buffers = model.named_buffers()
    masks = [mask for name, mask in buffers if name.endswith("weight_mask")]
    assert len(masks) == 4 and all(mask.mean() == 0.5 for mask in masks)


def test_the_table_of_strategies_has_bytes_and_losses_but_for_tensorrt(student):
    ends = dict.fromkeys(("vanilla", "accumulation", "fp16", "adafactor", "8-bit adam"), [1.0])
    start = Recipe("bert-large", batch_size=4, optimizer="adamw_torch_fused")
    table, extra = ablation_runs.empty_table(ends, student, start, {"bert-large": "BERT"})
    assert round(extra) == 8 and table.loc["TensorRT"].isna().all()
    assert table.drop("TensorRT").notna().all().all()
    peaks = table["BERT GiB"]
    assert peaks["pruning"] > peaks["none"] > peaks["8-bit Adam"] > peaks["checkpointing"]
    assert peaks["mixed precision"] < peaks["none"]
