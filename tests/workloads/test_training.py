"""The training loop that is simulated and measured: it trains, and it does what its recipe says."""

import sys

import pytest
import torch
from helpers import assert_two_steps_as_on_the_cpu, refused

from memlab import Recipe, simulate
from memlab.workloads.training import Training

TINY = Recipe(model="bert-large-tiny", batch_size=4, seq_len=32)


def gradients(recipe):
    """Gradients of one effective batch in float64, dropout off."""
    torch.manual_seed(0)
    training = Training(recipe)
    training.model.double().eval()
    training.optimizer.step = lambda *a, **k: None
    training.optimizer.zero_grad = lambda *a, **k: None
    return training


def test_the_seed_decides_everything():
    assert Training(TINY, seed=1).step() == Training(TINY, seed=1).step()
    assert Training(TINY, seed=1).step() != Training(TINY, seed=2).step()


@pytest.mark.parametrize("model", ["bert-large-tiny", "gpt2-tiny", "t5-3b-tiny"])
def test_padding_is_hidden_from_attention_and_loss(model):
    training = Training(Recipe(model=model, batch_size=2, seq_len=16, padded=True))
    (batch,) = training.batches
    assert batch["attention_mask"].sum(1).tolist() == [15, 15]
    if batch["labels"].dim() == 2:
        assert (batch["labels"] == -100).sum(1).tolist() == [1, 1]
    training.model.eval()
    loss = training.model(**batch).loss
    batch["input_ids"][:, -1] = 17
    torch.testing.assert_close(training.model(**batch).loss, loss)
    batch["input_ids"][:, 5] = 17
    assert training.model(**batch).loss != loss


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-3-8b-tiny"])
def test_texts_that_share_a_row_do_not_see_each_other(model, attention):
    training = Training(Recipe(model, seq_len=32, attention=attention, packed=True))
    training.model.double().eval()
    (batch,) = training.batches
    row, positions = batch["input_ids"], batch["position_ids"]
    assert positions.tolist() == [[*range(16), *range(16)]]
    with torch.no_grad():
        together = training.model(**batch).logits[:, 16:]
        alone = training.model(input_ids=row[:, 16:]).logits
    torch.testing.assert_close(together, alone)


def test_a_packed_row_takes_a_mask_on_the_card_as_without_one():
    recipe = Recipe("llama-3-8b-tiny", batch_size=2, seq_len=64, attention="sdpa", packed=True)
    assert_two_steps_as_on_the_cpu(recipe)
    plain, packed = (simulate(one, "A100-40GB") for one in (recipe.but(packed=False), recipe))
    assert packed.peak_allocated > plain.peak_allocated


def test_a_packed_recipe_leaves_the_seed_alone():
    torch.manual_seed(7)
    first = torch.rand(1)
    torch.manual_seed(7)
    Recipe({"model_type": "gpt2", "n_layer": 1, "n_embd": 24}, packed=True)
    assert torch.rand(1) == first


def test_accumulation_gives_the_gradient_of_the_big_batch():
    small = gradients(TINY.but(batch_size=2, accumulation=2))
    big = gradients(TINY.but(batch_size=4))
    big.batches = [
        {key: torch.cat([batch[key] for batch in small.batches]) for key in small.batches[0]}
    ]
    assert small.step() == pytest.approx(big.step(), rel=1e-12)
    for mine, its in zip(small.model.parameters(), big.model.parameters(), strict=True):
        if its.grad is not None:
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-9, atol=1e-12)


def test_zero_grad_keeps_or_frees():
    kept, freed = Training(TINY.but(set_to_none=False)), Training(TINY)
    kept.step()
    freed.step()
    assert all(p.grad is None for p in freed.model.parameters())
    grads = [p.grad for p in kept.model.parameters() if p.grad is not None]
    assert grads and all(not grad.any() for grad in grads)


@pytest.mark.parametrize("precision", ["fp32", "fp16-amp"])
def test_gradients_are_unscaled_and_clipped_before_the_step(precision):
    """On CPU tensors; loss scaling is at work there, too."""
    recipe = TINY.but(precision=precision, max_grad_norm=1e-3, set_to_none=False)
    training = Training(recipe)
    norms = []

    def before_the_step(optimizer, *_):
        grads = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.stack(grads).norm().item())

    training.optimizer.register_step_pre_hook(before_the_step)
    training.step()
    assert norms == [pytest.approx(1e-3, rel=1e-3)]


def test_precision_decides_the_dtypes():
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        pure = Training(TINY.but(precision=precision))
        pure.step()
        state = next(iter(pure.optimizer.state.values()))
        assert {p.dtype for p in pure.model.parameters()} == {dtype} == {state["exp_avg"].dtype}
        assert not pure.scaler.is_enabled()
    amp = Training(TINY.but(precision="fp16-amp"))
    assert next(amp.model.parameters()).dtype == torch.float32
    assert amp.scaler.is_enabled() and not Training(TINY).scaler.is_enabled()


def test_an_8_bit_recipe_leaves_no_override_behind():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    training = Training(TINY.but(optimizer="adamw_8bit"))
    training.step()
    table = training.model.get_input_embeddings().weight
    assert training.optimizer.state[table]["state1"].dtype == torch.float32
    # The process's manager would give these bits to whatever weight comes first.
    other = torch.nn.Linear(64, 64)
    other(torch.ones(1, 64)).sum().backward()
    optimizer = bitsandbytes.optim.AdamW8bit(other.parameters())
    optimizer.step()
    assert optimizer.state[other.weight]["state1"].dtype == torch.uint8
    assert not optimizer.mng.module_weight_config_triple  # nor does it hold the model


def test_an_8_bit_optimizer_without_bitsandbytes_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with refused("adamw_8bit needs the package bitsandbytes"):
        Training(TINY.but(optimizer="adamw_8bit"))


@pytest.mark.parametrize(
    ("model", "parts", "trained"),
    [
        ("bert-large-tiny", "backbone", {"classifier.weight", "classifier.bias"}),
        ("bert-large-tiny", "bert.encoder,embeddings,pooler", {"classifier.weight"}),
        ("llama-3-8b-tiny", (2,), {"model.embed_tokens.weight", "lm_head.weight"}),
        ("deberta-v3-base-tiny", "embeddings,1", {"deberta.encoder.layer.1.output.dense.weight"}),
    ],
)
def test_freezing(model, parts, trained):
    training = Training(Recipe(model=model, seq_len=16, freeze=parts))
    names = {n for n, p in training.model.named_parameters() if p.requires_grad}
    assert trained <= names and training.trainable_parameters < training.parameters
    assert parts != "backbone" or names == trained
    frozen = [p.detach().clone() for p in training.model.parameters() if not p.requires_grad]
    training.step()
    after = [p for p in training.model.parameters() if not p.requires_grad]
    assert all(torch.equal(one, other) for one, other in zip(frozen, after, strict=True))
    assert len(training.optimizer.param_groups[0]["params"]) == len(names)


@pytest.mark.parametrize("parts", ["encoder.layers", (3,), "backbone,classifier"])
def test_what_cannot_be_frozen_is_told(parts):
    with refused("freeze holds"):
        Training(TINY.but(freeze=parts))


@pytest.mark.parametrize(
    ("model", "targets", "task"),
    [
        ("llama-3-8b-tiny", "q_proj,v_proj", "causal-lm"),
        ("gpt2-tiny", "c_attn", "causal-lm"),
        ("bert-large-tiny", "all-linear", "sequence-classification"),
    ],
)
def test_lora_trains_adapters_and_a_new_head_only(model, targets, task):
    recipe = Recipe(model=model, task=task, seq_len=16, lora_rank=4, lora_targets=targets)
    training = Training(recipe)
    before = [p.detach().clone() for p in training.model.parameters()]
    training.step()
    training.step()  # the second adapter matrix begins with zeros
    for (name, after), old in zip(training.model.named_parameters(), before, strict=True):
        trained = "lora_" in name or "modules_to_save" in name
        assert after.requires_grad == trained, name
        assert torch.equal(after, old) != trained, name
    heads = [n for n, p in training.model.named_parameters() if "modules_to_save" in n]
    assert bool(heads) == (task == "sequence-classification")


USUAL = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        ("mixtral-8x7b-tiny", ("w1", "w2", "w3")),
        ("qwen3-30b-a3b-tiny", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_adapters_of_experts_by_their_usual_names(model, experts):
    """PEFT knows them by the names that they had before all experts were one tensor."""
    recipe = Recipe(model=model, lora_rank=2, seq_len=16, lora_targets=USUAL)
    attention = Training(recipe).trainable_parameters
    with_experts = Training(recipe.but(lora_targets=USUAL + experts))
    assert with_experts.trainable_parameters > attention
    assert with_experts.step() > 0


@pytest.mark.parametrize("fp32", [True, False])
def test_adapters_are_in_the_dtype_asked_for(fp32):
    recipe = Recipe(model="gpt2-tiny", precision="bf16", lora_rank=2, lora_fp32=fp32, seq_len=16)
    adapters = [p for p in Training(recipe).model.parameters() if p.requires_grad]
    assert {p.dtype for p in adapters} == {torch.float32 if fp32 else torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_targets": "q_proj"}, "bert-large-tiny has .*query"),
        ({"lora_targets": "query,q_proj"}, "lora_targets holds q_proj: bert-large-tiny has .*key"),
        ({"lora_rank": 100_000}, "allows whole numbers up to"),
    ],
)
def test_lora_that_does_not_fit_the_model_is_told(changes, said):
    with refused(said):
        Training(TINY.but(**({"lora_rank": 4} | changes)))
