"""What an inference server takes of a card at its start, and the tokens that its cache can hold.

A server such as vLLM does not grow with its texts. At its start it loads the weights, runs its
largest batch once to see what that borrows, and gives what is then left of a share of the card
(`gpu_memory_utilization`) to blocks of keys and values. The card is full from the beginning; the
question is how many tokens the blocks hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memlab import models
from memlab.fields import one_of, whole, wrong
from memlab.gpus import GPU, find_gpu
from memlab.predict.formula_serving import kv_cache_bytes
from memlab.workloads.quantized import to_be_quantized

# Bits a weight of linear layers and experts, constants included: AWQ and GPTQ keep an fp16 scale
# and a 4-bit zero point for each 128 weights, MXFP4 8 bits for 32, NVFP4 8 bits for 16, NF4 of
# bitsandbytes 8 bits for 64 and 32 for 256 of these. Head and embeddings stay in 16 bits.
BITS = {"16 bits": 16.0, "fp8": 8.0, "int8": 8.0, "awq": 4 + 20 / 128, "gptq": 4 + 20 / 128}
BITS |= {"nf4": 4 + 8 / 64 + 32 / (64 * 256), "mxfp4": 4 + 8 / 32, "nvfp4": 4 + 8 / 16}
BLOCK = 16  # tokens of a block
# Bytes a logit while a token is drawn: the logits in 16 and 32 bits, their sorted copy, its order
# in int64, the workspace of the sort, probabilities and their sums. vLLM's own profiles have 41.2
# (vllm#10511), 39.1 (vllm#13882), 38.9 and 38.4 (llm-d-planner, capacity_planner.py).
SAMPLER = 40
# GiB beside that, CUDA graphs and what is not PyTorch's: 0.03 in vllm#13882, 1.79 in vllm#10511,
# graphs of 0.6 in generative-computing/granite-switch#128.
BESIDE = (0.0, 2.0)


@dataclass(frozen=True)
class ServerCapacity:
    """Bytes of a card that a server has taken before the first text.

    given: its share of the card. weights. borrowed: by its largest batch. cache: (least, most)
    left for blocks of keys and values; below zero the server ends with an error. token: of the
    cache, one token's keys and values.
    """

    given: int
    weights: int
    borrowed: int
    cache: tuple[int, int]
    token: int

    @property
    def tokens(self) -> tuple[int, int]:
        """(least, most) tokens that the blocks hold, of all texts together."""
        return tuple(max(0, n) // (BLOCK * self.token) * BLOCK for n in self.cache)


def server(
    model: models.Model,
    gpu: GPU | str | int,
    weights: str = "16 bits",
    share: float = 0.92,
    texts: int = 256,
    batched_tokens: int = 8192,
    cache_bits: int = 16,
) -> ServerCapacity:
    """What a server of one GPU takes at its start; the defaults are vLLM's of 2026.

    weights: a name of `BITS`. share: `gpu_memory_utilization`. texts: `max_num_seqs`, which vLLM
    sets to 1,024 on a card of 70 GiB and more. batched_tokens: `max_num_batched_tokens`.
    cache_bits: of a key or value.

    Layers with a sliding window are counted as full ones, whose cache is larger. A batch borrows
    the larger of two: in a layer the two halves of the feed-forward projection, their product and
    four hidden states of each token; and what drawing a token takes for each logit of every text.

    Raises ValueError for an unknown format or card, a card without a limit, a share outside of 0
    to 1, sizes below 1, and for a model whose layers have heads of several sizes.
    """
    one_of("weights", weights, BITS)
    if not 0 < share <= 1:
        raise wrong("share", share, "above 0, up to 1")
    sizes = {"texts": texts, "batched_tokens": batched_tokens, "cache_bits": cache_bits}
    for name, value in sizes.items():
        whole(1)(name, value)
    card, config = find_gpu(gpu), models.config(model)
    if card.total_memory is None:
        raise ValueError(f"{card.name} has no limit: allowed are cards with a size")
    wide = max((getattr(config, name, None) or 0 for name in models.WIDTHS), default=0)
    layer = batched_tokens * 2 * (3 * wide + 4 * config.hidden_size)
    borrowed = max(layer, SAMPLER * texts * config.vocab_size)
    given = round(share * card.total_memory)
    held = _weights(config, BITS[weights])
    least, most = (given - held - borrowed - round(n * 2**30) for n in reversed(BESIDE))
    token = kv_cache_bytes(config, 1, 1, cache_bits / 8)
    return ServerCapacity(given, held, borrowed, (least, most), token)


def _weights(config, bits: float) -> int:
    """Bytes of the weights with linear layers and experts in a format, and the rest in 16 bits."""
    with torch.device("meta"):
        model = models.build(config)
    reached = {module.weight for module in to_be_quantized(model).values()}
    reached |= {weight for weight in model.parameters() if weight.dim() == 3}  # of experts
    return round(sum(w.numel() * (bits if w in reached else 16) / 8 for w in model.parameters()))
