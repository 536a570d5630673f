"""Buffers of sums along rows, beside what PyTorch took on a real card."""

import pytest

from memlab.gpus import find_gpu
from memlab.trace.reductions import Reduction

# Rows, columns, and bytes that PyTorch 2.11 took from its allocator on an H100, in blocks of 512
# bytes, as its profiler listed them in steps of runs of `memlab record` on 2026-11-27.
ON_H100 = [
    (2048, 256, 4_194_304),  # one of the norms of Gemma 3 1B's keys
    (2048, 768, 12_582_912),  # DeBERTa-v3 base, biases
    (2048, 1152, 18_874_368),  # Gemma 3 1B, norms
    (2048, 2048, 33_554_432),  # Llama 3.2 1B, norms
    (2048, 4096, 67_108_864),  # BERT large, biases in bf16
    (4096, 768, 25_165_824),  # DistilBERT, BERT base and GPT-2, biases
    (4096, 2304, 75_497_472),
    (4096, 3072, 100_663_296),
    (8192, 768, 50_331_648),  # BERT base, twice as many tokens
    (8192, 3072, 138_412_032),
    (32_768, 128, 33_554_432),  # Qwen3 0.6B, norms of the heads of keys and of queries
    (65_536, 128, 67_108_864),
    (4096, 30_522, 23_440_896),  # BERT base, the bias of the masked words
]


@pytest.mark.parametrize(("rows", "columns", "recorded"), ON_H100)
def test_a_buffer_is_as_large_as_on_a_recorded_card(rows, columns, recorded):
    nbytes = Reduction(rows, columns).buffer(find_gpu("H100").threads)
    assert -(-nbytes // 512) * 512 == recorded


def test_a_smaller_card_divides_columns_among_fewer_blocks():
    of_cards = [Reduction(65_536, 768).buffer(find_gpu(name).threads) for name in ("T4", "H100")]
    blocks = [nbytes / (4 * 768 * 128) for nbytes in of_cards]  # 128 sums for each block
    # 320 and 2,112 blocks fit on the cards at once; 6 read all columns. At least 64 for 256 values.
    assert blocks == [64, 352]


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 768), (512, 768), (1020, 768), (4096, 2**20), (4096, 1)]
)
def test_short_columns_and_many_need_no_buffer(rows, columns):
    assert Reduction(rows, columns).buffer(find_gpu("T4").threads) == 0
