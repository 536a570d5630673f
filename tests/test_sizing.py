"""One trace, resized, is the simulation of every micro-batch and length."""

from dataclasses import replace

import pytest
from helpers import TINY

from memlab import Recipe, models, simulate
from memlab.gpus import find_gpu
from memlab.simulation import full_log, peak_reserved_of, serve, serve_without_range
from memlab.sizing import SizedLog
from memlab.trace.events import Birth

LLAMA = Recipe("llama-3-8b-tiny", seq_len=64, attention="sdpa", precision="bf16")
WAYS = [
    TINY,
    TINY.but(precision="fp16-amp", accumulation=3, checkpointing=True, max_grad_norm=1.0),
    Recipe("bert-large-tiny", seq_len=64, optimizer="adafactor"),
    LLAMA.but(lora_rank=4, checkpointing=True),
    LLAMA.but(precision="bf16-amp", lora_rank=4, base="nf4", double_quant=True),
    Recipe("t5-3b-tiny", seq_len=64, optimizer="adamw_8bit"),
]


@pytest.mark.parametrize("recipe", WAYS, ids=str)
def test_every_size_is_as_simulated(recipe):
    card = find_gpu("L4")
    log = SizedLog(recipe, card)
    for batch, length in ((2, 64), (5, 128), (3, 100), (16, 256)):
        sized = recipe.but(batch_size=batch, seq_len=length)
        resized, whole = serve(sized, log.at(sized), card), simulate(sized, card)
        assert resized.peak_allocated == pytest.approx(whole.peak_allocated, rel=1e-3)
        assert resized.peak_reserved == pytest.approx(whole.peak_reserved, rel=2e-3)
        assert resized.reserved_range == whole.reserved_range
        assert resized.peak_phase == whole.peak_phase
        assert resized.parameters == whole.parameters


@pytest.mark.parametrize(("gpu", "kernel"), [("P100", "efficient"), ("L4", "flash")])
def test_what_attention_rounds_up(gpu, kernel):
    """The memory-efficient kernel's sums go in 32 tokens, flash's backward in 128."""
    recipe, card = Recipe("bert-base-tiny", attention="sdpa", precision="fp16-amp"), find_gpu(gpu)
    log = SizedLog(recipe.but(seq_len=64), card)
    for batch, length in ((3, 40), (2, 64), (5, 200)):
        sized = recipe.but(batch_size=batch, seq_len=length)
        resized, whole = (
            [step for _, step in one.events() if type(step) is Birth]
            for one in (log.at(sized), full_log(sized, card))
        )
        assert any(kernel in str(birth.operation) for birth in whole)
        assert [birth.nbytes for birth in resized] == [birth.nbytes for birth in whole]


@pytest.mark.parametrize("base", ({}, {"lora_rank": 4, "base": "nf4"}))
def test_all_micro_batches_wait_on_the_card(base):
    """Of more of them the tokens are there, too."""
    card = find_gpu("L4")
    recipe = Recipe("llama-3-8b-tiny", seq_len=64, precision="fp16-amp", accumulation=5, **base)
    log = SizedLog(recipe, card)
    for number in (2, 5, 300):
        sized = recipe.but(batch_size=300, seq_len=512, accumulation=number)
        full = full_log(sized, card)
        resized, whole = (serve_without_range(sized, one, card) for one in (log.at(sized), full))
        assert resized.peak_allocated == whole.peak_allocated
        assert resized.peak_reserved == whole.peak_reserved
        assert log.least(sized) == pytest.approx(whole.peak_allocated, rel=0.01)
        tight = replace(card, total_memory=whole.peak_reserved + card.context + 2**28)
        peak = peak_reserved_of(sized, full, tight)
        assert log.is_served(sized, tight) == (peak is not None)


def test_a_depth_that_is_written_out():
    recipe = Recipe("gpt2-medium", seq_len=128, attention="sdpa")
    sized = recipe.but(batch_size=3, seq_len=512)
    resized = serve(sized, SizedLog(recipe, find_gpu(None)).at(sized), find_gpu(None))
    assert resized.peak_allocated == simulate(sized).peak_allocated
    assert resized.peak_reserved == simulate(sized).peak_reserved


def test_a_length_ends_at_the_model_or_at_its_window():
    card = find_gpu("L4")
    assert SizedLog(TINY, card).longest == 1024
    assert SizedLog(Recipe("t5-3b-tiny", seq_len=16), card).longest is None
    narrow = models.resized("mistral-7b-tiny", sliding_window=256)
    recipe = Recipe(narrow, seq_len=64, attention="sdpa", precision="bf16")
    assert SizedLog(recipe, card).longest == 256
    wide = recipe.but(seq_len=512)
    log = SizedLog(wide, card)
    assert log.longest == models.max_length(narrow)
    resized = serve(wide, log.at(wide), card)
    assert resized.peak_allocated == pytest.approx(simulate(wide, card).peak_allocated, rel=1e-3)
