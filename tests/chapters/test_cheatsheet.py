"""The cheat sheet: what its words say of a technique, of the recipes that its rows run."""

import re
from types import SimpleNamespace

import pytest
import torch
from notebook import Notebook

from memlab.book.chapters import cheatsheet
from memlab.book.chapters.cheatsheet import cell
from memlab.footprint import StepTime

SHEET = Notebook("cheatsheet")


@pytest.fixture(scope="module")
def sheet():
    return SHEET.run("plain") | {"changes": cheatsheet.CHANGES}


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
