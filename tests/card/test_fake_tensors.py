"""Fake tensors live and die as real ones: the same log on both, in every category."""

import contextlib
import gc

import pytest
import torch

from memlab import Recipe
from memlab.card.fake_tensors import tensors_without_data
from memlab.libraries import import_bitsandbytes
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

RECIPES = [
    Recipe(model="bert-large-tiny", batch_size=2, seq_len=64),
    Recipe(model="bert-large-tiny", batch_size=2, seq_len=64, accumulation=3, attention="sdpa"),
    Recipe(model="bert-base-tiny", task="masked-lm", seq_len=64, precision="bf16-amp"),
    Recipe(model="gpt2-tiny", batch_size=2, seq_len=64, checkpointing=True),
    Recipe(model="gpt2-tiny", seq_len=64, checkpointing="reentrant", precision="fp16-amp"),
    Recipe(model="llama-3-8b-tiny", batch_size=2, seq_len=64, precision="bf16"),
    Recipe(model="qwen2.5-0.5b-tiny", seq_len=64, optimizer="sgd"),
    Recipe(model="distilbert-tiny", seq_len=64, optimizer="adamw_torch_loop"),
    Recipe(model="llama-3-8b-tiny", seq_len=64, precision="bf16", lora_rank=4, checkpointing=True),
    Recipe(model="bert-large-tiny", seq_len=64, lora_rank=4, lora_dropout=0.1),
    Recipe(model="llama-3-8b-tiny", seq_len=64, lora_rank=4, base="half", precision="bf16-amp"),
    Recipe(model="gpt2-tiny", seq_len=64, lora_rank=4, base="half", precision="bf16-amp"),
    Recipe(model="bert-large-tiny", seq_len=64, freeze="embeddings,1", optimizer="adafactor"),
    Recipe(model="bert-base-tiny", batch_size=2, seq_len=61, padded=True, attention="sdpa"),
    Recipe(model="gpt2-tiny", batch_size=2, seq_len=64, padded=True),
    Recipe(model="llama-3-8b-tiny", batch_size=2, seq_len=64, padded=True, attention="sdpa"),
    Recipe(model="deberta-v3-base-tiny", seq_len=64, optimizer="adamw_torch_fused"),
    Recipe(model="llama-3-8b-tiny", seq_len=64, lora_rank=4, base="nf4", precision="bf16-amp"),
    Recipe(model="qwen2.5-0.5b-tiny", seq_len=64, lora_rank=4, base="fp4", double_quant=True),
    Recipe(model="gpt2-tiny", seq_len=64, lora_rank=4, base="nf4", upcast=False, precision="bf16"),
    Recipe(model="bert-large-tiny", seq_len=64, lora_rank=4, base="nf4", checkpointing=True),
    Recipe(model="llama-3-8b-tiny", seq_len=64, lora_rank=4, base="int8", checkpointing=True),
]


import_bitsandbytes("this test")  # it is prepared for fake tensors if it is there


def footprint(recipe, context):
    with context, Tracer() as tracer:
        training = Training(recipe)
        tracer.watch(training.model, inputs=training.inputs)
        training.step()
        gc.collect()
        tracer.reset_peak()
        training.step()
    return tracer.footprint()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_fake_run_holds_what_the_real_run_holds(recipe):
    real = footprint(recipe, contextlib.nullcontext())
    fake = footprint(recipe, tensors_without_data())
    assert fake.peak_allocated == pytest.approx(real.peak_allocated, rel=1e-5)
    assert fake.peak_phase == real.peak_phase
    for category, nbytes in real.breakdown.items():
        assert fake.breakdown[category] == pytest.approx(nbytes, rel=1e-3, abs=2048), category


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(6, 4),
        lambda x: x.t(),
        lambda x: x.transpose(0, 1)[1:],
        lambda x: x[2, 1::2],
        lambda x: x[:, None].expand(4, 3, 6),
        lambda x: x.detach(),
        lambda x: x.select(1, 2),
    ],
)
def test_a_view_is_the_one_that_real_tensors_make(view):
    def told(context):
        with context:
            base = torch.empty(4, 6, dtype=torch.float16)
            made = view(base)
            assert made.untyped_storage()._cdata == base.untyped_storage()._cdata
            return made.shape, made.stride(), made.storage_offset(), made.dtype, made.device

    assert told(tensors_without_data()) == told(contextlib.nullcontext())


def test_what_an_operator_refuses_is_raised_and_not_logged_as_well(caplog):
    with tensors_without_data():
        x = torch.ones(4, 80)
        for refused in (lambda: x * torch.ones(4, 32), lambda: x @ x):
            with pytest.raises(RuntimeError):
                refused()
    assert not caplog.records
