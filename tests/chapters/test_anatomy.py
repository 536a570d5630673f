"""The anatomy chapter: what it shows is what memlab runs."""

import ast

import pytest
import torch
from notebook import Notebook

from memlab import Recipe, models, simulate
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


def plain_training(training, place, steps):
    """The recipe's model, optimizer and batch, for a loop that is not memlab's."""
    model = models.build(training.recipe.model).to(place)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    batch = {name: x.to(place) for name, x in training.batches[0].items()}
    return model, adamw, [batch] * steps


def test_the_shown_loop_and_the_recipe_give_the_same_losses(shown):
    recipe = Recipe(batch_size=2, optimizer="adamw_torch_loop").twin(seq_len=32)
    training = Training(recipe)
    losses = [training.step() for _ in range(3)]  # each model's dropout begins when it is built
    assert losses == shown["train"](*plain_training(training, "cpu", 3))


def test_the_shown_loop_and_the_recipe_have_the_same_peak(shown):
    recipe = Recipe(batch_size=4, optimizer="adamw_torch_loop").twin()
    training = Training(recipe)
    with shown["SimulatedGPU"]() as gpu:
        model, adamw, batches = plain_training(training, "cuda", 1)
        shown["train"](model, adamw, batches)
        gpu.reset_peak()
        shown["train"](model, adamw, batches)
        peak = gpu.footprint.peak_allocated
    assert peak == simulate(recipe).peak_allocated


def test_two_depths_give_what_any_depth_keeps(shown):
    recipe = Recipe("gpt2", batch_size=2, seq_len=64)
    assert shown["at_depth"](recipe, 6) == shown["kept"](recipe, 6)


@pytest.mark.parametrize(
    "model, precision, attention, expected",
    [
        ("bert-large", "bf16", "eager", (34, 5)),  # Korthikanti and others, section 4.1
        ("bert-large", "fp32", "eager", (66, 9)),
        ("gpt2", "bf16", "sdpa", (58, 0)),
    ],
)
def test_coefficients_of_a_layer(shown, model, precision, attention, expected):
    found = shown["coefficients"](model, precision, attention)
    assert list(found) == pytest.approx(expected, abs=0.1)


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


def test_relu_keeps_its_output_and_an_addition_nothing():
    kept = []

    def keep(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    x, y = (torch.ones(4, requires_grad=True) * 2 for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        z = x + y
        assert kept == []
        out = z.relu()
    assert kept == [out.data_ptr()]
    out = z.relu().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
