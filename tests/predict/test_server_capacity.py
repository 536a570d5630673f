"""What a server takes at its start, beside what servers have printed of themselves."""

import pytest

from memlab import server
from memlab.gpus import find_gpu

GiB = 2**30
# Of vLLM's logs: what was asked, then GiB of weights, of the largest batch, and left for the cache.
PRINTED = {
    "vllm#10511, Llama 3 8B on an H100": (
        {"model": "llama-3-8b", "gpu": round(79.22 * GiB), "share": 0.9},
        (14.96, 1.26, 53.29),
    ),
    "vllm#13882, Qwen2.5 7B AWQ on an RTX 4060": (
        {"model": "qwen2.5-7b", "gpu": 8 * GiB, "share": 0.7, "weights": "awq"},
        (5.20, 1.42, -1.05),
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_weights_batch_and_cache_are_as_printed(name):
    asked, (weights, borrowed, cache) = PRINTED[name]
    found = server(**asked)
    assert found.weights / GiB == pytest.approx(weights, rel=0.003)
    assert found.borrowed / GiB == pytest.approx(borrowed, rel=0.04)
    least, most = (n / GiB for n in found.cache)
    assert least <= cache <= most
    assert (found.tokens == (0, 0)) == (cache < 0)


def test_the_blocks_of_a_published_server():
    """vllm#2031: Llama 2 7B on an A100-80GB had 7,351 blocks of 16 tokens, before it 7,449."""
    least, most = server("llama-2-7b", "A100-80GB", share=0.9, batched_tokens=4096).tokens
    assert least <= 7351 * 16 <= most and least <= 7449 * 16 <= most
    assert least % 16 == most % 16 == 0


def test_many_texts_borrow_for_their_logits():
    """llm-d-planner, capacity_planner.py: 4.76 and 5.56 GiB, with vLLM's 1,024 texts of an H100."""
    for model, printed in (("llama-3.1-8b", 4.76), ("qwen3-0.6b", 5.56)):
        found = server(model, "H100", texts=1024)
        assert found.borrowed / GiB == pytest.approx(printed, rel=0.05)


def test_a_share_of_the_card_is_given_whatever_the_model():
    small, large = (server(name, "RTX-4090", texts=16) for name in ("qwen3-0.6b", "qwen3-8b"))
    assert small.given == large.given == round(0.92 * find_gpu("RTX-4090").total_memory)
    assert small.tokens[0] > large.tokens[0] > 0
    halved = server("qwen3-8b", "RTX-4090", texts=16, cache_bits=8)
    assert halved.token * 2 == large.token and halved.cache == large.cache
    assert server("qwen3-8b", "RTX-4090", "fp8", texts=16).weights < 0.6 * large.weights


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"weights": "fp7"}, "weights is 'fp7': allowed are 16 bits, fp8"),
        ({"share": 1.2}, "share is 1.2: allowed are above 0, up to 1"),
        ({"cache_bits": 0}, "cache_bits is 0: allowed are"),
    ],
)
def test_what_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        server(**{"model": "qwen3-8b", "gpu": "T4"} | changes)
