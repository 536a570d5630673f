"""Losses in parts give the model's own loss and gradients, and never hold its logits."""

import contextlib
import re

import pytest
import torch
import transformers
from helpers import SMALL, assert_two_steps_as_on_the_cpu, refused
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto

from memlab import Recipe, models, simulate
from memlab.workloads.training import Training

PARTS = ["chunked", "linear_cross_entropy"]
# 3 * 128 tokens are a part and a half.
TINY = Recipe("llama-3-8b-tiny", batch_size=3, seq_len=128)
LONG = Recipe(
    models.with_layers("llama-3.2-1b", 1),
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
    assert_as_whole(recipe, loss)


def assert_as_whole(recipe, loss):
    whole, of_whole = gradients(recipe)
    in_parts, of_parts = gradients(recipe.but(loss=loss))
    torch.testing.assert_close(in_parts, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(of_parts, of_whole, rtol=1e-4, atol=1e-7)


OPT = {"ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0}  # a head of another width
LLAMA4 = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}


@pytest.mark.parametrize(
    ("family", "more"),
    [("olmo2", {}), ("glm4", {"head_dim": 8}), ("opt", OPT), ("llama4_text", LLAMA4)],
)
def test_other_families_train_in_parts_as_whole(family, more):
    recipe = Recipe(SMALL | more | {"model_type": family}, batch_size=8, seq_len=64)
    assert_as_whole(recipe, "chunked")


@pytest.mark.slow
def test_every_causal_family_is_answered_or_refused_in_one_line():
    """By the defaults of its config's class, at two layers; some have none that build a model."""
    answered = 0
    for family in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = transformers.CONFIG_MAPPING[family]()
            if "causal-lm" not in models.tasks(config):
                continue
        # No config, defaults that are not valid, no task.
        except (KeyError, ValueError, StrictDataclassError):
            continue
        with contextlib.suppress(AttributeError):  # BLT has no such field
            config = models.with_layers(config, 2)
        try:
            answered += bool(Recipe(config, task="causal-lm", seq_len=64, loss="chunked"))
        except ValueError as error:
            assert re.search("head|logits|loss|router|not a valid", str(error)), family
            assert "\n" not in str(error), family
    assert answered > 100


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


def test_without_pytorchs_own_it_is_refused(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    with refused("since PyTorch 2.13"):
        TINY.but(loss="linear_cross_entropy")
