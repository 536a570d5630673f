"""What chapter 15 trains: the same samples for every way, ways that only cut the batch, masks."""

import pytest
import torch

from memlab.book.chapters import ablation_runs
from memlab.evidence.records import find_records


@pytest.fixture(scope="module")
def student():
    return ablation_runs.reader("cpu", rate=1e-2)


@pytest.fixture(scope="module")
def nine():
    return {run.name: run.recipe for run in find_records("published", "V100")}


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
