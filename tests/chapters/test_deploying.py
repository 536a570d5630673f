"""Chapter 18: its loops are generate, its cache is transformers', its pruning keeps a function."""

import pytest
import torch
from helpers import kv_cache_bytes
from notebook import cells_of
from transformers import DynamicCache

from memlab import models

GiB = 2**30


chapter = cells_of(
    "18-deploying", "imports settings per-token plain-loop loop-code server-code prune-code"
)


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


# Of vLLM's logs: what was asked, then GiB of weights, of the largest batch, and left for the cache.
PRINTED = {
    "vllm#10511, Llama 3 8B on an H100": (
        {"model": "llama-3-8b", "total": 79.22 * GiB, "share": 0.9},
        (14.96, 1.26, 53.29),
    ),
    "vllm#13882, Qwen2.5 7B AWQ on an RTX 4060": (
        {"model": "qwen2.5-7b", "total": 8 * GiB, "share": 0.7, "bits": 4 + 20 / 128},
        (5.20, 1.42, -1.05),
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_servers_weights_batch_and_cache_are_as_printed(chapter, name):
    asked, (weights, batch, cache) = PRINTED[name]
    found = chapter["server"](**asked)
    assert found["weights"] / GiB == pytest.approx(weights, rel=0.003)
    assert found["largest batch"] / GiB == pytest.approx(batch, rel=0.04)
    least, most = (size / GiB for size in found["cache"])
    assert least <= cache <= most
    assert (found["tokens"] == [0, 0]) == (cache < 0)


def test_a_cut_of_dead_neurons_keeps_the_function(chapter):
    model = models.build("llama-3-8b-tiny").eval()
    for block in model.model.layers:
        block.mlp.down_proj.weight.data[:, ::2] = 0
    ids = torch.arange(32)[None]
    with torch.no_grad():
        before, wide = model(input_ids=ids).logits, model.num_parameters()
        chapter["narrow"](model)
        assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-5)
    assert model.num_parameters() < wide
