"""The cheat sheet: what its words say of a technique, of the recipes that its rows run."""

import re
from types import SimpleNamespace

import pytest
import torch
from notebook import Notebook

from memlab import Recipe, find_gpu, formula
from memlab.book.chapters import cheatsheet, low_rank
from memlab.book.chapters.cheatsheet import cell
from memlab.footprint import StepTime

SHEET = Notebook("cheatsheet")
CARD = find_gpu("RTX-4090").without_limit()


@pytest.fixture(scope="module")
def sheet():
    return SHEET.run("plain") | {"changes": cheatsheet.CHANGES}


def by_formula(sheet, row, which="encoder", **more):
    change = sheet["changes"][row][which == "decoder"]
    return formula(sheet[which].but(**(change | more)), CARD)


def a_fit(needed, low, high, fits=True):
    step = StepTime(low, (low + high) / 2, high, {}, 0, 0.0)

    class Fit(SimpleNamespace):
        def __bool__(self):
            return fits

    return Fit(needed=needed * 2**30, footprint=SimpleNamespace(step_seconds=step))


def test_a_time_is_said_with_its_range_and_never_by_one_figure():
    plain = a_fit(16, 0.3, 0.4)
    assert cell(plain, plain) == "<b>16.0 GiB ✓</b><br>0.30–0.40 s a step"
    alike = cell(a_fit(12, 0.24, 0.44, fits=False), plain)
    assert alike == "<b>12.0 GiB ✗</b><br>-25%<br>time × 0.8–1.2"
    assert cell(a_fit(12, 0.6, 0.8), plain).endswith("time × 1.6–2.5")


def test_what_does_not_fit_can_be_compared_with():
    lora = a_fit(40, 0.3, 0.4, fits=False)
    said = cell(a_fit(30, 0.3, 0.4), a_fit(60, 0.3, 0.4), lora)
    assert "-50%<br>of LoRA -25%" in said


def test_each_row_has_its_words_and_a_cell_for_each_model():
    fit = a_fit(16, 0.3, 0.4)
    table = cheatsheet.sheet(dict.fromkeys(cheatsheet.CHANGES, [fit, fit])).data
    assert table.count("<tr") == 1 + len(cheatsheet.CHANGES)
    assert table.count("GiB ✓") == 2 * len(cheatsheet.CHANGES)


def test_qlora_differs_from_lora_by_its_base_alone(sheet):
    for which, lora, qlora in zip(
        ("encoder", "decoder"), sheet["changes"]["lora"], sheet["changes"]["qlora"], strict=True
    ):
        assert {k for k in qlora if qlora[k] != lora.get(k)} == {"base", "double_quant", "upcast"}
        recipe = sheet[which].but(**qlora)
        assert recipe.precision == "bf16" and recipe.compute_dtype == "bf16" and not recipe.upcast


def test_the_code_of_qlora_asks_for_what_its_row_runs():
    from transformers import BitsAndBytesConfig

    shown = re.search(r"BitsAndBytesConfig\(.*?\)", cheatsheet.WORDS, re.DOTALL)[0]
    config = eval(shown, {"BitsAndBytesConfig": BitsAndBytesConfig, "torch": torch})
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.bfloat16  # the default is fp32


def test_eight_bit_states_lower_the_peak_and_not_the_activations(sheet):
    for which in ("encoder", "decoder"):
        plain, less = (by_formula(sheet, row, which) for row in ("plain", "8-bit"))
        assert plain.breakdown["activations"] == max(plain.breakdown.values())
        assert less.breakdown["activations"] == plain.breakdown["activations"]
        assert less.peak_allocated < 0.95 * plain.peak_allocated


def test_autocast_costs_memory_only_where_gradients_wait_over_a_single_sequence(sheet):
    def change(batch, accumulation):
        size = dict(batch_size=batch, accumulation=accumulation)
        plain, amp = (by_formula(sheet, row, **size) for row in ("plain", "precision"))
        return amp.peak_allocated / plain.peak_allocated - 1

    assert change(1, 4) > 0.03
    assert change(4, 4) < change(2, 4) < 0
    assert max(change(batch, 1) for batch in (1, 2, 4)) < 0.001


def test_only_16_bits_fuse_the_decoders_attention(sheet):
    decoder = dict(which="decoder")
    plain, eager = (by_formula(sheet, row, **decoder) for row in ("plain", "eager"))
    assert eager.peak_allocated == pytest.approx(plain.peak_allocated, rel=0.01)
    amp, apart = (by_formula(sheet, "precision", **decoder, attention=a) for a in ("sdpa", "eager"))
    assert amp.peak_allocated < 0.8 * apart.peak_allocated
    encoder = [by_formula(sheet, row).peak_allocated for row in ("plain", "eager")]
    assert encoder[1] > 1.5 * encoder[0]


def test_lora_has_little_left_to_save_where_activations_are_nearly_all():
    sizes = dict(seq_len=512, precision="bf16", attention="sdpa", optimizer="adamw_torch_fused")
    few, many = (
        [
            formula(Recipe("bert-large", batch_size=n, **sizes, **more), CARD).peak_allocated
            for more in ({}, {"lora_rank": 16})
        ]
        for n in (1, 64)
    )
    assert few[1] < 0.6 * few[0] and many[1] > 0.95 * many[0]


@pytest.mark.slow
def test_simulated_rows_keep_their_order(sheet):
    runs = cheatsheet.row_runs(sheet["encoder"], sheet["decoder"], "RTX-4090")
    need = {name: [run.needed for run in pair] for name, pair in runs.items()}
    for i in (0, 1):
        assert need["8-bit"][i] < 0.95 * need["plain"][i]
        assert need["qlora"][i] < need["lora"][i]
    encoders, decoders = zip(*need.values(), strict=True)
    assert max(encoders) == need["eager"][0] > 1.5 * need["plain"][0]
    assert max(decoders) == need["eager"][1] < 1.01 * need["plain"][1]


def test_what_is_said_of_qloras_time_is_as_published():
    each = [low_rank.TORCHTUNE_TOKENS / low_rank.TORCHTUNE[kind][1] for kind in ("LoRA", "QLoRA")]
    said = f"takes {each[1] / each[0] - 1:.0%} longer, {each[1]:.2f} s for {each[0]:.2f}"
    assert said.replace("%", " %") in SHEET.text["title"]
