"""The anatomy chapter: what it shows is what memlab runs, and its tools give the known figures."""

import ast

import pytest
import torch
from notebook import Notebook

from memlab import Recipe, check, models, simulate
from memlab.workloads.training import Training

CHAPTER, DEEPER = Notebook("03-anatomy"), Notebook("03-anatomy-deeper")


@pytest.fixture(scope="module")
def shown():
    """The names that the chapter's imports and definitions make, without running the rest."""
    names, kept = {}, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    for id, source in CHAPTER.code.items():
        if id == "install":
            continue
        tree = ast.parse(source)
        if id != "imports":
            tree.body = [node for node in tree.body if isinstance(node, kept)]
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


@pytest.mark.parametrize(
    "model, precision, attention, expected",
    [
        ("bert-large", "bf16", "eager", (34, 5)),  # Korthikanti and others, section 4.1
        ("bert-large", "fp32", "eager", (66, 9)),
        ("gpt2", "bf16", "sdpa", (58, 0)),
    ],
)
def test_coefficients_of_a_layer(shown, model, precision, attention, expected):
    found = shown["coefficients"](model, precision=precision, attention=attention)
    assert found == pytest.approx(expected, abs=0.1)


def test_two_depths_give_the_peak_of_any_depth(shown):
    assert shown["at_depth"]("gpt2", 6, seq_len=64) == shown["kept"](
        shown["cut"]("gpt2", 6, seq_len=64)
    )


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


def test_the_buggy_estimate_is_told_so_and_the_fixed_one_passes(shown, capsys):
    truth = simulate(Recipe(model="bert-large-tiny", seq_len=32))
    waiting = shown["kept"](Recipe(model="bert-large-tiny", seq_len=32))
    assert not check(shown["estimate"](truth.parameters, waiting), truth.peak_tensors, 0.02)
    assert "too small" in capsys.readouterr().out
    assert check(shown["fixed"](truth.parameters, waiting), truth.peak_tensors, 0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-amp", "fp16-amp"])
def test_a_logit_takes_twelve_bytes_at_the_peak_on_both_pages(shown, precision):
    """Log-softmax, its gradient and the logits', in fp32; without the output matrix's copies."""
    said = Notebook("09-tokenizers").run("vocabulary-formula")["logit"]
    assert shown["bytes_per_logit"](precision) == pytest.approx(said) == 12


def test_what_waits_is_layers_what_the_loss_keeps_and_little_more():
    """The two tables on GPT-2 1.5B count layers; a whole model keeps log-softmax beside them."""
    names = DEEPER.run("imports waiting big-models")
    config, kept = names["big"]["GPT-2 1.5B"], names["one_layer"]
    log_softmax = 32 * 1024 * config.vocab_size * 4 / names["GB"]
    for switch in (False, True):
        recipe = Recipe("gpt2-xl", **names["shape"], checkpointing=switch)
        layers = config.num_hidden_layers * kept(config, checkpointing=switch)
        beside = names["waiting"](recipe) / names["GB"] - layers - log_softmax
        assert 0 < beside < 0.5
