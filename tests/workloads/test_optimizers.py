"""Steps in the backward pass: the same parameters, and no gradients to keep."""

import pytest
import torch
from helpers import assert_two_steps_as_on_the_cpu

from memlab import Recipe, simulate
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
