"""The cheat sheet: what it says to write exists, and is what its rows run."""

import inspect
import re

import pytest
import torch
from notebook import Notebook
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PreTrainedModel, TrainingArguments

SHEET = Notebook("cheatsheet")


@pytest.fixture(scope="module")
def written():
    """The code of the table, a piece each."""
    return re.findall(r"`([^`]+)`", SHEET.text["title"])


def test_every_setting_is_one_of_the_library(written):
    known = set(inspect.signature(TrainingArguments).parameters)
    known |= {"dtype"} if "dtype" in inspect.getsource(PreTrainedModel.from_pretrained) else set()
    plain = [piece.partition("=")[0] for piece in written if re.match(r"\w+=", piece)]
    assert len(plain) >= 6 and set(plain) <= known


def test_the_configs_are_made_and_ask_for_what_the_rows_run(written):
    names = {"BitsAndBytesConfig": BitsAndBytesConfig, "LoraConfig": LoraConfig, "torch": torch}
    made = [eval(piece, names) for piece in written if re.match(r"\w+Config\(", piece)]
    lora, four_bits = made
    assert four_bits.bnb_4bit_quant_type == "nf4" and four_bits.bnb_4bit_use_double_quant
    assert four_bits.bnb_4bit_compute_dtype == torch.bfloat16  # the default is fp32
    page = SHEET.run("plain changes")
    rows = page["changes"](page["decoder"])
    assert lora.r == rows["LoRA, bf16 weights"]["lora_rank"]
    recipe = page["decoder"].but(**rows["QLoRA"])
    assert recipe.compute_dtype == "bf16" and not recipe.upcast and recipe.double_quant
