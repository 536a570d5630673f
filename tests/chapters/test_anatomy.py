"""The anatomy chapter: what it shows is what memlab runs."""

import ast
from types import SimpleNamespace

import pytest
import torch
from notebook import Notebook, assert_steps_agree

from memlab import Recipe, models
from memlab.workloads.training import Training

CHAPTER = Notebook("03-anatomy")


@pytest.fixture(scope="module")
def shown():
    """The chapter's definitions, without what it runs on them."""
    names, kinds = {}, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    for id, source in CHAPTER.code.items():
        if id == "install":
            continue
        tree = ast.parse(source)
        if id != "imports":
            tree.body = [node for node in tree.body if isinstance(node, kinds)]
        exec(compile(tree, id, "exec"), names)
    return names


def test_the_shown_loop_and_the_recipe_have_the_same_losses_and_peak(shown):
    recipe = Recipe(batch_size=2, optimizer="adamw_torch_loop").twin(seq_len=32)
    library = Training(recipe)
    model = models.build(recipe.model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    parts = SimpleNamespace(model=model, optimizer=adamw)  # of a loop that is not memlab's
    assert_steps_agree(parts, lambda: shown["train"](model, adamw, library.batches)[0], library)


def test_two_depths_give_what_any_depth_keeps(shown):
    recipe = Recipe("gpt2", batch_size=2, seq_len=64)
    assert shown["at_depth"](recipe, 6) == shown["kept"](recipe, 6)


def test_the_loss_in_parts_is_the_loss_with_the_same_gradient(shown):
    results = []
    for name, rows in {"whole": {}, "in_parts": {"rows": 10}, "in_one_call": {"rows": 10}}.items():
        torch.manual_seed(0)
        x = torch.randn(48, 16, requires_grad=True)
        head = torch.randn(100, 16, requires_grad=True)
        loss = shown[name](x, head, torch.arange(48), **rows)
        loss.backward()
        results.append((loss, x.grad, head.grad))
    whole, *others = results
    for parts in others:
        torch.testing.assert_close(parts, whole)


def test_the_callback_measures_one_step_of_the_trainer(shown):
    recipe = Recipe("bert-large-tiny", batch_size=1, seq_len=16)
    callback = shown["MeterCallback"]()
    shown["train_with"](recipe, callback)
    assert callback.meter.footprint.breakdown["optimizer_states"] > 0
