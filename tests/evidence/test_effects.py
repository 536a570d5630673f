"""What each CUDA rule changes: the rows sum up, and each rule stands where its source says."""

import inspect
import re

import pytest
import torch

from memlab import Recipe, SimulatedGPU, models
from memlab.card.kernels.bitsandbytes import cuda_module
from memlab.card.kernels.rules import RULES
from memlab.evidence.accuracy import simulate_on_cpu
from memlab.evidence.effects import changed_bytes
from memlab.libraries import import_bitsandbytes
from memlab.predict.run import two_steps

import_bitsandbytes("this test")
TINY = Recipe("bert-base-tiny", batch_size=8, seq_len=256)


def few_words():
    """A decoder whose logits are small, so that the peak lies in its layers."""
    config = models.config("llama-2-7b-tiny")
    config.vocab_size, config.bos_token_id, config.eos_token_id = 64, 1, 1
    return config


QLORA = Recipe(
    few_words(), seq_len=512, lora_rank=2, base="nf4", compute_dtype="fp16", upcast=False
)


@pytest.mark.parametrize(
    ("recipe", "changing"),
    [
        (TINY.but(attention="sdpa", optimizer="paged_adamw_8bit"), {"attention", "paged states"}),
        (TINY.but(precision="fp16-amp"), {"dropout", "autocast"}),
        (QLORA, {"softmax to fp32", "scratch of kernels"}),
    ],
    ids=["sdpa, paged", "autocast", "QLoRA"],
)
def test_the_rows_lead_from_the_cpu_to_the_card(recipe, changing):
    rows = {row.rule: row for row in changed_bytes(recipe, "T4")}
    assert list(rows) == ["the CPU's kernels", *RULES, "workspaces", "rounding"]
    plain = simulate_on_cpu(recipe).peak_tensors
    assert rows["the CPU's kernels"].nbytes == pytest.approx(plain, rel=1e-4)
    with SimulatedGPU("T4") as gpu:
        two_steps(recipe, gpu)
    whole = gpu.footprint
    assert sum(row.nbytes for row in rows.values()) == whole.peak_allocated
    met = {name for name in RULES if rows[name].nbytes}
    assert changing <= met, {name: rows[name].nbytes for name in RULES}
    assert all(row.source for name, row in rows.items() if name != "the CPU's kernels")
    assert rows["8-bit products"].nbytes == 0  # no recipe here meets it


def source_of(operator):
    """bitsandbytes' CUDA kernel of an operator, as Python text."""
    text = inspect.getsource(cuda_module())
    return re.split(r"\n@register_kernel|\ndef ", text.split(f'"bitsandbytes::{operator}"')[1])[1]


@pytest.mark.parametrize("operator", ["quantize_4bit", "quantize_blockwise"])
def test_bitsandbytes_makes_the_scales_before_the_weights(operator):
    made = re.findall(r"(\w+) = torch\.empty", source_of(operator))
    assert made[:2] == ["absmax", "out"]


def test_bitsandbytes_multiplies_in_int32_and_fp16():
    assert "dtype=torch.int32" in source_of("int8_linear_matmul")
    assert "torch.empty_like(A, dtype=torch.float16)" in source_of("int8_mm_dequant")
    assert "outliers.any()" in source_of("int8_vectorwise_quant")


def test_bitsandbytes_pages_states_from_100_000_elements_on():
    optimizer = __import__("bitsandbytes").optim.optimizer.Optimizer8bit
    assert "p.numel() < 1e5" in inspect.getsource(optimizer.get_state_buffer)


def test_a_number_without_a_device_is_the_hosts():
    """torch.tensor's documentation: the device is that of the data, the CPU for a number."""
    from torch.optim.adam import Adam

    if torch.__version__ >= "2.12":  # which names the place that it had before, too
        assert 'torch.tensor(0.0, dtype=_get_scalar_dtype(), device="cpu")' in inspect.getsource(
            Adam._init_group
        )
    with SimulatedGPU() as gpu:
        number = torch.tensor(0.0)
        assert torch.cuda.memory_allocated() == 0
        number.to("cuda") + torch.ones(1, device="cuda")
    assert gpu.footprint.peak_allocated > 0
