"""Steps in the backward pass: the same parameters, and no gradients to keep."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_two_steps_as_on_the_cpu, of_the_recipe, one_line

from memlab import Recipe, formula, measure, simulate
from memlab.workloads.optimizers import make_optimizer
from memlab.workloads.training import Training

TINY = Recipe("gpt2-tiny", batch_size=2, seq_len=32)


def trained(recipe):
    training = Training(recipe)
    training.model.eval()
    for _ in range(2):
        training.step()
    assert all(p.grad is None for p in training.model.parameters())
    return list(training.model.parameters())


@pytest.mark.parametrize(
    "recipe",
    [
        TINY,
        TINY.but(optimizer="adamw_torch_fused", checkpointing=True, loss="chunked"),
        TINY.but(optimizer="sgd", checkpointing="reentrant"),
        TINY.but(optimizer="adafactor", lora_rank=4),
    ],
    ids=str,
)
def test_parameters_are_those_of_a_step_afterwards(recipe):
    after, inside = trained(recipe), trained(recipe.but(step_in_backward=True))
    torch.testing.assert_close(inside, after)


@pytest.mark.parametrize("optimizer", ["adamw_torch_loop", "adafactor"])
def test_a_cards_bytes_are_those_of_a_real_run(optimizer):
    recipe = TINY.but(optimizer=optimizer, step_in_backward=True, batch_size=4, seq_len=64)
    assert_two_steps_as_on_the_cpu(recipe)


def test_gradients_are_no_longer_all_there():
    recipe = Recipe("llama-3.2-1b", seq_len=128, precision="bf16", optimizer="adamw_torch_fused")
    after, inside = simulate(recipe, "H100"), simulate(recipe.but(step_in_backward=True), "H100")
    assert after.breakdown["optimizer_states"] == inside.breakdown["optimizer_states"]
    # All but that of the tied embedding and head, the largest, which comes last.
    table = 128_256 * 2048 * 2
    gradients = after.parameters * 2
    assert after.peak_allocated - inside.peak_allocated > gradients - 2 * table
    # A step does the same work at another time: the time of the step has all of it.
    assert inside.step_seconds.flops == after.step_seconds.flops
    assert inside.step_seconds.expected == pytest.approx(after.step_seconds.expected, rel=0.1)


TORCHAO = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="it is not here")


@TORCHAO
@pytest.mark.parametrize(("optimizer", "bits"), [("adamw_torch_8bit", 8), ("adamw_torch_4bit", 4)])
def test_torchaos_states_are_those_of_a_real_run(optimizer, bits, monkeypatch):
    recipe = TINY.but(optimizer=optimizer, precision="bf16")
    simulated = simulate(recipe)
    assert any("torchao's compiled step" in one for one in simulated.assumptions)
    # What is compiled for this CPU, in a minute, has the same states.
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    real = measure(recipe, "cpu", steps=1).footprint
    weights = len(list(Training(recipe).model.parameters()))
    on_host = 4 * weights  # counts of steps
    states = simulated.breakdown["optimizer_states"]
    assert real.breakdown["optimizer_states"] - on_host == states
    assert states == pytest.approx(simulated.parameters * bits / 8 * 2, rel=0.1)


@TORCHAO
def test_torchaos_step_trains(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    whole, inside = (
        trained(TINY.but(optimizer="adamw_torch_8bit", step_in_backward=choice))
        for choice in (False, True)
    )
    torch.testing.assert_close(inside, whole)
    untrained = Training(TINY).model.parameters()
    assert not all(map(torch.equal, whole, untrained))


@TORCHAO
def test_torchaos_states_have_a_trace():
    recipe = Recipe("llama-3.2-1b", seq_len=256, precision="bf16", optimizer="adamw_torch_4bit")
    quick, whole = formula(recipe, "L4"), simulate(recipe, "L4")
    assert quick.peak_allocated == pytest.approx(whole.peak_allocated, rel=0.01)
    assert quick.breakdown["optimizer_states"] == pytest.approx(
        whole.breakdown["optimizer_states"], rel=1e-3
    )
    assert set(of_the_recipe(quick.assumptions)) == set(whole.assumptions)


@TORCHAO
def test_rounding_at_random_keeps_small_updates(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    recipe = TINY.but(optimizer="adamw_torch_8bit", precision="bf16")
    moved = []
    for one in (recipe, recipe.but(stochastic_rounding=True)):
        training = Training(one)
        before = [weight.detach().float() for weight in training.model.parameters()]
        training.step()
        after = [weight.detach().float() for weight in training.model.parameters()]
        moved.append(sum((a != b).sum().item() for a, b in zip(after, before, strict=True)))
    # A step of 1e-5 is less than half of the distance between most weights of 0.02 and the next.
    assert moved[1] > 1.5 * moved[0]
    bytes_of = [simulate(one).peak_allocated for one in (recipe, training.recipe)]
    assert bytes_of[0] == bytes_of[1]
    arguments = training.recipe.training_arguments(use_cpu=True)
    assert arguments.optim_args == "bf16_stochastic_round=True"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adamw_8bit", "precision": "bf16"}, "adamw_torch_8bit or adamw_torch_4bit"),
        ({"optimizer": "adamw_torch_8bit"}, "precision is 'fp32': its weights are not in bf16"),
    ],
)
def test_what_is_not_rounded_is_refused(changes, words):
    with pytest.raises(ValueError) as error:
        TINY.but(stochastic_rounding=True, **changes)
    assert words in one_line(error)


def test_without_torchao_its_optimizers_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError) as error:
        simulate(TINY.but(optimizer="adamw_torch_8bit"))
    assert "adamw_torch_8bit needs the package torchao" in one_line(error)
    with pytest.raises(ValueError) as error:
        TINY.but(optimizer="adamw_torch_8bit", ranks=2, sharding="zero1")
    assert "allowed is sharding ddp" in one_line(error)


def test_a_name_that_nothing_is_made_for_does_not_train_as_another():
    with pytest.raises(ValueError) as error:
        make_optimizer(SimpleNamespace(**vars(TINY) | {"optimizer": "muon"}), Training(TINY).model)
    assert "optimizer is 'muon'" in one_line(error)


def test_it_has_no_formula():
    with pytest.raises(ValueError) as error:
        formula(TINY.but(step_in_backward=True))
    assert "step_in_backward=True" in one_line(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulation": 2},
        {"max_grad_norm": 1.0},
        {"precision": "fp16-amp"},
        {"ranks": 2},
        {"set_to_none": False},
    ],
    ids=str,
)
def test_what_needs_all_gradients_is_refused(changes):
    with pytest.raises(ValueError) as error:
        TINY.but(step_in_backward=True, **changes)
    ((name, value),) = changes.items()
    assert one_line(error).startswith(f"step_in_backward is True and {name} is {value!r}: ")
