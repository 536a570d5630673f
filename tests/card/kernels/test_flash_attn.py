"""`attn_implementation="flash_attention_2"` on a card: what transformers does with flash-attn."""

import pytest
import torch
from helpers import refused
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM

from memlab import MiB, Recipe, SimulatedGPU, models, simulate
from memlab.card.kernels import flash_attn
from memlab.card.kernels.scratch import kernel_scratch
from memlab.card.placement import NotSimulated
from memlab.gpus import find_gpu
from memlab.predict.trace_recorder import are_alike, run_log
from memlab.predict.traces import Traces

MODEL, CARD = models.config("llama-3-8b-tiny"), "A100-40GB"
ANY = find_gpu(CARD)
LAYERS, HEADS, SIZE = MODEL.num_hidden_layers, MODEL.num_attention_heads, MODEL.head_dim
RECIPE = Recipe(MODEL, batch_size=2, seq_len=256, precision="bf16", attention="flash_attention_2")


def step(attention, inputs, gpu=CARD):
    """The footprint of a step of a script, and the attention's operations, forward and backward."""
    with SimulatedGPU(gpu) as card:
        model = AutoModelForCausalLM.from_config(
            MODEL, attn_implementation=attention, dtype=torch.bfloat16
        ).to("cuda")
        given = {name: rows.cuda() for name, rows in inputs.items()}
        model(**given, labels=given["input_ids"], use_cache=False).loss.backward()
    work = card.work.of_step
    attended = sum(times * one.flops for one, times in work.items() if one.flops and not one.result)
    return card.footprint, attended


def tokens(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape) % MODEL.vocab_size


def pairs(*lengths):
    """Operations of attention under a causal mask: 2 products forward and 5 backward."""
    return LAYERS * HEADS * 7 * 2 * SIZE * sum(n * n for n in lengths) // 2


def test_a_whole_batch_takes_what_sdpas_flash_takes():
    inputs = {"input_ids": tokens(4, 256)}
    (ours, ours_done), (sdpa, done) = (step(a, inputs) for a in ("flash_attention_2", "sdpa"))
    assert (ours.peak_allocated, ours.breakdown) == (sdpa.peak_allocated, sdpa.breakdown)
    assert ours_done == done == pairs(*4 * [256])


def test_padding_is_neither_kept_nor_computed():
    mask = torch.ones(4, 256, dtype=torch.long)
    mask[0, 96:] = 0
    _, done = step("flash_attention_2", {"input_ids": tokens(4, 256), "attention_mask": mask})
    assert done == pairs(96, 256, 256, 256)


def test_texts_of_one_row_are_told_apart_by_their_positions():
    inputs = {"input_ids": tokens(1, 1024)}
    inputs["position_ids"] = torch.cat([torch.arange(n) for n in (100, 324, 600)])[None]
    (ours, done), (sdpa, _) = (step(a, inputs) for a in ("flash_attention_2", "sdpa"))
    assert done == pairs(100, 324, 600)
    assert sdpa.peak_allocated - ours.peak_allocated >= MiB  # yes and no of every pair of tokens


def test_the_reader_is_told_what_it_does_not_take():
    inputs = {"input_ids": tokens(1, 16)}
    with pytest.raises(RuntimeError, match="only supports Ampere"):
        step("flash_attention_2", inputs, "T4")
    with SimulatedGPU("T4"), pytest.raises(RuntimeError, match="only supports Ampere"):
        packed = torch.zeros(16, 2, 64, device="cuda", dtype=torch.half)
        varlen_attn(packed, packed, packed, *2 * [torch.tensor([0, 9, 16]).int().cuda()], 9, 9)
    with SimulatedGPU(CARD):
        query = torch.zeros(1, 16, 2, 64, device="cuda")
        with pytest.raises(RuntimeError, match="fp16 and bf16"):
            flash_attn.flash_attn_func(query, query, query)
        wide = torch.zeros(1, 16, 2, 512, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="at most 256"):
            flash_attn.flash_attn_func(wide, wide, wide)
        with refused("deterministic", kind=NotSimulated):
            flash_attn.flash_attn_func(query.half(), query.half(), query.half(), deterministic=True)


def test_odd_heads_come_back_as_they_went():
    with SimulatedGPU(CARD):
        query = torch.zeros(2, 16, 4, 60, device="cuda", dtype=torch.bfloat16)
        assert flash_attn.flash_attn_func(query, query, query).shape == query.shape


def test_without_a_card_the_package_is_as_missing_as_before():
    with pytest.raises(ImportError, match="installed"):
        AutoModelForCausalLM.from_config(MODEL, attn_implementation="flash_attention_2")


@pytest.mark.parametrize(("sequences", "keys"), [(1, 4), (3, 2)])
def test_scratch_of_ragged_sequences_has_128_rows_for_each(sequences, keys):
    rows = torch.zeros(300, 4, 64, dtype=torch.bfloat16, device="meta")
    shared = rows[:, :keys]
    borders = torch.zeros(sequences + 1, dtype=torch.int32)
    lse = torch.zeros(4, 300, device="meta")
    taken = kernel_scratch(
        torch.ops.aten._flash_attention_backward.default,
        (rows, rows, shared, shared, rows, lse, borders, borders),
    )
    sums = 4 * 4 * (300 + 128 * sequences)
    assert taken == [[sums, sums * 64] + (2 * [300 * 4 * 64 * 2] if keys < 4 else [])]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}, {"batch_size": 5, "seq_len": 80}])
def test_whole_rows_have_a_trace_of_all_sizes(changes):
    recipe = RECIPE.but(**changes)
    found, direct = Traces().of(recipe, ANY), run_log(recipe, ANY)
    assert found is not None and are_alike(Traces().log(recipe, ANY), direct)


def test_a_packed_recipe_is_one_row_of_all_texts():
    packed = RECIPE.but(packed=True)
    assert Traces().of(packed, ANY) is None  # borders are one more than texts
    with_mask = simulate(packed.but(attention="sdpa"), CARD)
    assert simulate(packed, CARD).peak_allocated < with_mask.peak_allocated
    assert simulate(packed, CARD).step_seconds.flops < with_mask.step_seconds.flops


@pytest.mark.parametrize(
    ("changes", "gpu", "said"),
    [
        ({"precision": "fp16"}, "T4", "compute capability 7.5, flash-attn needs 8.0"),
        ({"precision": "fp32"}, CARD, "flash-attn computes in half precision"),
    ],
)
def test_a_recipe_that_it_does_not_take_is_one_line(changes, gpu, said):
    with refused(said):
        simulate(RECIPE.but(**changes), gpu)
