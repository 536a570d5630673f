"""Chapter 13: its adapters are those that memlab trains."""

import pytest
import torch
from notebook import cells_of

from memlab import Recipe, simulate
from memlab.workloads.training import Training

chapter = cells_of("13-lora", "imports settings adapter-weights lora-linear lora-start merge")


def test_merged_adapters_give_what_they_gave_apart(chapter):
    shown = Training(Recipe("llama-3-8b-tiny", batch_size=2, seq_len=32))
    model, (batch,) = shown.model, shown.batches
    optimizer = chapter["lora_start"](model, 4, chapter["LINEAR"])
    optimizer.param_groups[0]["lr"] = 1e-2
    with torch.no_grad():
        untouched = model(**batch).logits
    for _ in range(3):
        chapter["train_step"](model, optimizer, batch)
    with torch.no_grad():
        before = model(**batch).logits
        chapter["merge"](model)
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-4)
    assert (before - untouched).abs().max() > 0.1
    assert not any(isinstance(m, chapter["LoRALinear"]) for m in model.modules())


@pytest.mark.parametrize("names", ["all-linear", "q_proj,v_proj"])
def test_adapter_weights_are_those_that_peft_makes(chapter, names):
    recipe = Recipe("llama-3-8b-tiny", seq_len=16, lora_rank=4, lora_targets=names)
    asked = [] if names == "all-linear" else [names.split(",")]
    counted = chapter["adapter_weights"]("llama-3-8b-tiny", 4, *asked)
    assert counted == Training(recipe).trainable_parameters


@pytest.mark.slow
def test_what_axolotls_quickstart_took_is_predicted():
    """Its files of examples/openllama-3b; what is not quantized goes to fp16 for its kernels."""
    widths = {"hidden_size": 3200, "intermediate_size": 8640, "vocab_size": 32000}
    heads = {"num_hidden_layers": 26, "num_attention_heads": 32, "num_key_value_heads": 32}
    config = {"model_type": "llama", "tie_word_embeddings": False, **widths, **heads}
    how = {"checkpointing": True, "attention": "sdpa", "max_grad_norm": 1.0}
    full = Recipe(config, "causal-lm", seq_len=1024, **how)
    adapters = full.but(batch_size=2, precision="fp16-amp", lora_rank=8, upcast=False, base="int8")
    recipes = [
        full.but(precision="fp16", optimizer="adamw_8bit"),
        adapters.but(optimizer="adamw_8bit"),
        adapters.but(base="nf4", double_quant=True, lora_dropout=0.05),
    ]
    held = [simulate(recipe, "RTX-3090").device_used / 2**30 for recipe in recipes]
    assert held == pytest.approx([21, 7, 4.5], abs=0.6)  # its maintainer's figures
