"""Losses in parts give the model's own loss and gradients, and never hold its logits."""

import pytest
import torch
from helpers import assert_two_steps_as_on_the_cpu, one_line

from memlab import Recipe, formula, largest, models, simulate
from memlab.workloads.training import Training

PARTS = ["chunked", "linear_cross_entropy"]
# 3 * 128 tokens are a part and a half.
TINY = Recipe("llama-3-8b-tiny", batch_size=3, seq_len=128)
LONG = Recipe(
    models.with_layers("llama-3.2-1b", 2),
    seq_len=8192,
    precision="bf16",
    attention="sdpa",
    checkpointing=True,
    optimizer="adamw_torch_fused",
)
KEPT = ("parameters", "gradients", "optimizer_states")


@pytest.fixture(autouse=True)
def _there(request):
    named = getattr(request.node, "callspec", None)
    if named and "linear_cross_entropy" in named.params.values():
        if not hasattr(torch.nn.functional, "linear_cross_entropy"):
            pytest.skip("it came with PyTorch 2.13")


def gradients(recipe):
    training = Training(recipe)
    training.model.eval()
    (loss,) = training.make_gradients()
    return loss, {name: p.grad for name, p in training.model.named_parameters()}


@pytest.mark.parametrize("loss", PARTS)
@pytest.mark.parametrize(
    "recipe",
    [TINY, TINY.but(model="gpt2-tiny", padded=True), TINY.but(lora_rank=4, checkpointing=True)],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_whole(recipe, loss):
    whole, of_whole = gradients(recipe)
    in_parts, of_parts = gradients(recipe.but(loss=loss))
    torch.testing.assert_close(in_parts, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(of_parts, of_whole, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("loss", PARTS)
def test_a_cards_bytes_are_those_of_a_real_run(loss):
    recipe = TINY.but(loss=loss, optimizer="adamw_torch_loop")
    assert_two_steps_as_on_the_cpu(recipe)


@pytest.mark.parametrize("loss", PARTS)
def test_the_peak_lacks_the_logits(loss):
    whole, in_parts = (simulate(r, "H100") for r in (LONG, LONG.but(loss=loss)))
    logits = 8192 * 128_256 * 4  # in fp32, and their logarithms of probabilities
    assert whole.peak_allocated - in_parts.peak_allocated > 2 * logits
    assert in_parts.peak_tensors - sum(in_parts.breakdown[c] for c in KEPT) < 0.5 * logits
    assert in_parts.step_time.flops >= whole.step_time.flops  # the head's product again


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "bert-large"}, "loss is 'chunked' and task is 'sequence-classification'"),
        ({"model": "gemma-2-2b"}, "its logits are changed after the product"),
        ({"model": "llama-3.2-1b", "loss": "fused"}, "allowed are whole, chunked, linear"),
    ],
)
def test_what_has_no_parts_is_refused(changes, said):
    with pytest.raises(ValueError) as error:
        Recipe(**{"loss": "chunked", **changes})
    assert said in one_line(error)


def test_without_pytorchs_own_it_is_refused(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    with pytest.raises(ValueError) as error:
        TINY.but(loss="linear_cross_entropy")
    assert "from PyTorch 2.13" in one_line(error)


def test_without_its_packages_ligers_is_refused(monkeypatch):
    monkeypatch.setattr("memlab.spec.combinations.find_spec", lambda name: None)
    with pytest.raises(ValueError) as error:
        TINY.but(loss="liger")
    assert "liger_kernel and triton cannot be imported" in one_line(error)


def test_ligers_holds_a_chunk_and_the_gradients():
    """A chunk has as many tokens as make its logits about as large as all hidden states."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel", reason="pip install memlab[liger]")
    whole, fused = (simulate(r, "H100") for r in (LONG, LONG.but(loss="liger")))
    logits = 8192 * 128_256 * 4
    assert whole.peak_allocated - fused.peak_allocated > 2 * logits
    beside = fused.peak_tensors - sum(fused.breakdown[c] for c in KEPT)
    assert beside < 0.5 * logits and any("Triton" in said for said in fused.assumptions)


def test_adapters_of_the_head_are_refused_where_only_its_weight_counts():
    recipe = TINY.but(lora_rank=4, lora_targets="q_proj,lm_head", loss="linear_cross_entropy")
    with pytest.raises(ValueError) as error:
        simulate(recipe)
    assert "no adapters beside it" in one_line(error)
    assert simulate(recipe.but(loss="chunked"))


@pytest.mark.parametrize("ask", [formula, lambda recipe: largest(recipe, "L4")])
def test_what_needs_a_trace_refuses_in_one_line(ask):
    with pytest.raises(ValueError) as error:
        ask(TINY.but(loss="chunked"))
    assert "loss" in one_line(error)


def test_the_trainer_takes_the_models_own():
    with pytest.raises(ValueError) as error:
        TINY.but(loss="chunked").training_arguments()
    assert "loss is 'chunked'" in one_line(error)
