"""Chapter 18: its loops are generate, its cache is transformers', its pruning keeps a function."""

import copy

import pytest
import torch
from notebook import Notebook
from transformers import DynamicCache

from memlab import models
from memlab.predict.formula_serving import kv_cache_bytes

CHAPTER = Notebook("18-deploying")


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run("imports settings per-token plain-loop loop-code prune-code")


def test_the_shown_loops_write_what_generate_writes(chapter):
    twin = models.build("llama-3-8b-tiny").eval()
    prompt = torch.arange(1, 33)[None]
    plain = chapter["generate"](twin, prompt, 8)
    cached = chapter["generate_cached"](twin, prompt, 8, DynamicCache(config=twin.config))
    twin.generation_config.eos_token_id = None
    theirs = twin.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(plain, theirs) and torch.equal(cached, theirs) and plain.shape == (1, 40)


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "gemma-3-270m", "qwen3-8b"])
def test_a_token_of_the_cache_has_the_bytes_of_the_formula(chapter, name):
    assert chapter["per_token"](models.config(name)) == kv_cache_bytes(name, 1)


def test_zeros_keep_a_fifth_and_a_cut_of_dead_neurons_keeps_the_function(chapter):
    model = models.build("llama-3-8b-tiny").eval()
    masked = copy.deepcopy(model)
    chapter["zeros"](masked)
    masks = [m for name, m in masked.named_buffers() if name.endswith("weight_mask")]
    assert len(masks) == 14
    assert all(mask.mean().item() == pytest.approx(0.2, abs=1e-3) for mask in masks)
    for block in model.model.layers:
        block.mlp.down_proj.weight.data[:, ::2] = 0
    ids = torch.arange(32)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        chapter["narrow"](model)
        assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-5)
