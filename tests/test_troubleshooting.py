"""The page on troubles: its figures are what shapes give; its names exist."""

import html
import inspect
import math
import re

import pytest
import torch
import transformers
from contents import ROOT
from figures import FIGURE
from torch._subclasses import FakeTensorMode
from transformers.quantizers import quantizer_bnb_4bit

from memlab import find_gpu, models
from memlab.libraries import import_bitsandbytes

CHAPTERS = ROOT / "chapters"

PAGE = (CHAPTERS / "troubleshooting.md").read_text(encoding="utf-8")
FIGURES = [(match[1], match[4]) for match in FIGURE.finditer(PAGE)]


@pytest.fixture(scope="module")
def known():
    """The names that the page's figures are made of."""
    llama = models.config("llama-3-8b")
    with FakeTensorMode():
        weights = models.build("llama-3-8b").num_parameters()
        small = models.build("llama-3.2-3b").num_parameters()
    d, inner = llama.hidden_size, llama.intermediate_size
    keys = d * llama.num_key_value_heads // llama.num_attention_heads
    shapes = [(d, d), (d, keys), (d, keys), (d, d), (d, inner), (d, inner), (inner, d)]
    return {
        "llama": llama,
        "weights": weights,
        "small": small,
        "table": llama.vocab_size * d,
        "adapters": 16 * llama.num_hidden_layers * sum(map(sum, shapes)),
        "card": find_gpu("RTX-4090"),
        "gib": lambda size: f"{size / 2**30:.1f}",
        "MiB": 2**20,
        "math": math,
    }


@pytest.mark.parametrize("expression, said", sorted(set(FIGURES)))
def test_a_figure_is_what_the_shapes_give(expression, said, known):
    assert eval(html.unescape(expression), known) == said


def defaults(config):
    return {name: one.default for name, one in inspect.signature(config).parameters.items()}


def test_old_names_are_refused_and_new_ones_taken():
    names = defaults(transformers.TrainingArguments)
    table = PAGE.partition("## Changed names")[2]
    rows = re.findall(r"^\| `(\w+)=[^`]*` \| `(\w+)=", table, re.MULTILINE)
    assert len(rows) == 6
    for old, new in rows:
        if new != "dtype":  # an argument of from_pretrained
            assert new in names and (old in names) == (old == "gradient_checkpointing"), old


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("Some modules are dispatched on the CPU or the disk", quantizer_bnb_4bit),
        ("Cannot re-initialize CUDA in forked subprocess", torch.cuda),
        ("Token indices sequence length is longer than", transformers.tokenization_utils_base),
        (re.search(r"- `(bnb_4bit_compute_dtype=[^`]*)`", PAGE)[1], "bitsandbytes"),
    ],
)
def test_a_message_of_another_library_is_said_as_it_says_it(message, where):
    source = import_bitsandbytes("this test").nn.modules if where == "bitsandbytes" else where
    assert f"`{message}`" in PAGE and message in inspect.getsource(source)


def test_formats_that_do_not_meet_have_the_message_of_the_page():
    with pytest.raises(RuntimeError) as refusal:
        torch.nn.Linear(2, 2, dtype=torch.float16)(torch.ones(1, 2))
    assert re.search(r"- `(mat1 and mat2[^`]*)`", PAGE)[1] in str(refusal.value)
