"""What chapter 10 counts and lays out: pixels, plans, times, the panel's memory, rows of texts."""

import numpy as np
import pytest
import torch

from memlab import Recipe, find_gpu, formula, models, simulate
from memlab.book.chapters import packed_rows, padding

TEXTS = [[5, 6, 7], [8] * 9, [9, 10]]


def test_a_card_that_cannot_run_the_recipe_gives_a_line_and_no_panel(capsys):
    assert padding.memory_of(Recipe("bert-base", precision="bf16"), find_gpu("T4")) is None
    assert "T4 has no native bfloat16" in capsys.readouterr().out


def test_the_panels_coefficients_meet_the_simulation():
    bert = Recipe("bert-base", batch_size=16, attention="sdpa", padded=True)
    memory = padding.memory_of(bert, find_gpu("T4"))

    def panel(r, w):
        return memory["fixed"] + r * w * (memory["token"] + w * memory["pair"])

    peak = simulate(bert.but(seq_len=512), gpu="T4").peak_allocated
    assert panel(16, 512) == pytest.approx(peak, rel=0.01)
    for r, w in [(16, 61), (64, 64), (3, 300)]:
        # The panel is a plane; what is left of segments that blocks share lies beside it.
        height = formula(bert.but(batch_size=r, seq_len=w), gpu="T4").peak_allocated
        assert max(memory["least"], panel(r, w)) == pytest.approx(height, rel=5e-3)


def test_one_row_has_borders_and_blocks():
    row = packed_rows.one_row(TEXTS)
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 12, 14]
    assert row["position_ids"][0, :5].tolist() == [0, 1, 2, 0, 1]
    blocks = packed_rows.blocks([2, 1])[0, 0].tolist()
    assert np.array_equal(blocks, [[1, 1, 0], [1, 1, 0], [0, 0, 1]])


def test_attention_of_variable_length_is_causal_in_a_decoder():
    decoder, row = models.build("gpt2-tiny", attention="sdpa").eval(), packed_rows.one_row(TEXTS)
    row["use_cache"] = False
    with torch.no_grad():
        by_mask = decoder(**row).logits
        decoder.set_attn_implementation("text_by_text")
        torch.testing.assert_close(decoder(**row).logits, by_mask, rtol=1e-4, atol=1e-4)
    assert packed_rows.leak(decoder, TEXTS, **row) < 1e-4


def test_trl_lays_out_what_the_chapter_says():
    texts = [[i % 50] * (30 + 17 * i % 400) for i in range(64)]
    table = packed_rows.trl_layouts(texts)
    if not table:
        pytest.skip("TRL is not installed")
    assert table["padding_free"] == [f"1 x {sum(map(len, texts[:16]))}", "positions"]
    rows, width = map(int, table["packing"][0].split(" x "))
    assert rows == 1 and 900 < width <= 1024 and table["packing"][1] == "positions"
    assert table["packing, wrapped"] == ["2 x 512", "mask"]
    assert table["neither"][0].startswith("16 x ")
