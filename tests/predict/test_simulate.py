"""The simulated GPU: full-size figures, the reader's own loops, and running out of memory."""

import re
import sys

import pytest
import torch
from helpers import run_python

from memlab import MiB, Recipe, SimulatedGPU, measure, models, simulate
from memlab.spec.optimizers import OPTIMIZERS
from memlab.workloads.training import Training

BERT = Recipe(model="bert-large", batch_size=4, seq_len=512, optimizer="adamw_torch_loop")


@pytest.mark.parametrize(
    ("changes", "tensors", "phase"),
    [
        ({}, 10_528, "backward"),
        ({"batch_size": 1}, 5_531, "backward"),
        ({"batch_size": 1, "accumulation": 4}, 6_798, "backward"),
        ({"batch_size": 1, "accumulation": 4, "checkpointing": True}, 5_352, "optimizer step"),
    ],
)
def test_bert_large_at_full_size(changes, tensors, phase):
    footprint = simulate(BERT.but(**changes))
    assert footprint.peak_tensors / MiB == pytest.approx(tensors, rel=0.005)
    assert footprint.breakdown["parameters"] / MiB == pytest.approx(1278.5, abs=0.05)
    assert footprint.breakdown["optimizer_states"] / MiB == pytest.approx(2557, abs=0.2)
    assert footprint.parameters == footprint.trainable_parameters == 335_143_938
    assert footprint.peak_phase == phase
    assert sum(footprint.breakdown.values()) == footprint.peak_allocated
    assert footprint.peak_allocated <= footprint.peak_reserved


def test_every_layer_keeps_a_padding_mask_of_its_own():
    model = models.with_layers("bert-base", 2)
    recipe = Recipe(model, batch_size=16, seq_len=256, attention="sdpa")
    full, padded = simulate(recipe), simulate(recipe.but(padded=True))
    more = padded.breakdown["activations"] - full.breakdown["activations"]
    masks = 2 * 16 * 256 * 256 * 4
    assert more == pytest.approx(masks, rel=0.01)


ALONE = """
import memlab
recipe = memlab.Recipe(model="gpt2-tiny", seq_len=16, lora_rank=2)
assert memlab.simulate(recipe) == memlab.simulate(recipe)
memlab.simulate(memlab.Recipe(model="bert-large", batch_size=4))
print(open("/proc/self/status").read())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_new_process_says_the_same_twice_and_takes_little_memory():
    """peft imports bitsandbytes, which makes tables: on the card, if it came too late."""
    # Not ru_maxrss, which a process takes over from the one that started it.
    highest = int(re.search(r"VmHWM:\s+(\d+) kB", run_python(ALONE).stdout)[1]) * 1024
    assert highest < 3 * 2**29  # importing PyTorch takes most, and a CUDA build more than others


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_more_micro_batches_hold_what_two_hold(checkpointing):
    tiny = Recipe(model="bert-large-tiny", batch_size=2, seq_len=64, checkpointing=checkpointing)
    with SimulatedGPU() as gpu:
        training = Training(tiny.but(accumulation=5), gpu.device, built_in=gpu.device)
        gpu.watch(training.model, inputs=training.inputs)
        training.step()
        gpu.reset_peak()
        training.step()
        whole = gpu.footprint
    short = simulate(tiny.but(accumulation=5))
    losses = 3 * 512  # the loop keeps each loss until the end of the step, a block each
    assert short.peak_allocated + losses == whole.peak_allocated
    assert short.peak_reserved == whole.peak_reserved


@pytest.mark.parametrize(
    "optimizer", ["sgd", "adamw_torch_fused", "adamw_8bit", "lion_8bit", "adafactor"]
)
def test_states_of_optimizers_equal_a_real_run(optimizer):
    recipe = Recipe(model="bert-base-tiny", batch_size=2, seq_len=64, optimizer=optimizer)
    simulated, real = simulate(recipe), measure(recipe, "cpu", steps=1)
    for category in ("parameters", "optimizer_states"):
        there = real.footprint.breakdown[category]
        assert simulated.breakdown[category] == pytest.approx(there, abs=4096)
    known, config = OPTIMIZERS[optimizer], models.config(recipe.model)
    if known.states:  # Adafactor's are by rows and columns
        tables = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
        tables *= config.hidden_size  # whose states are in 32 bits
        nbytes = 4 * tables + known.bits // 8 * (simulated.parameters - tables)
        states = simulated.breakdown["optimizer_states"]
        assert states == pytest.approx(known.states * nbytes, rel=0.03)


def test_the_default_step_is_the_one_of_cuda():
    def peak(**choice):
        with SimulatedGPU() as gpu:
            zeros = [torch.zeros(256, 1024, device="cuda") for _ in range(8)]
            weights = [torch.nn.Parameter(values) for values in zeros]
            optimizer = torch.optim.AdamW(weights, **choice)
            for _ in range(2):
                gpu.reset_peak()
                sum(weight.sum() for weight in weights).backward()
                optimizer.step()
                optimizer.zero_grad()
            return gpu.footprint.peak_tensors

    assert peak() == peak(foreach=True) > peak(foreach=False)
    recipe = Recipe("gpt2-tiny", batch_size=1, seq_len=8)
    kinds = "adamw_torch", "adamw_torch_fused", "adamw_torch_loop"
    lists, fused, loop = (simulate(recipe.but(optimizer=kind)).peak_tensors for kind in kinds)
    assert lists > fused > loop  # a fused step counts on the card


def test_pure_fp16_takes_what_pure_bf16_takes():
    half = Recipe("gpt2-tiny", seq_len=64, precision="fp16", max_grad_norm=1.0)
    bfloat = half.but(precision="bf16")
    assert simulate(half, "T4").parameters
    assert simulate(half).peak_tensors == simulate(bfloat).peak_tensors


def test_clipping_makes_no_second_copy_of_the_gradients():
    """Only norms are made, of 512 bytes each as blocks; the gradients shrink in place."""
    plain = Recipe("gpt2-tiny", batch_size=1, seq_len=8, optimizer="sgd")
    clipped = simulate(plain.but(max_grad_norm=1.0))
    weights = 2 * 12 + 4  # 12 in a layer, two embeddings, the last norm's two
    more = clipped.peak_allocated - simulate(plain).peak_allocated
    assert 0 <= more <= 512 * (2 * weights + 8)


@pytest.mark.parametrize("gpu", ["T4", "A100-40GB"])  # a kernel of transformers, and PyTorch's
def test_experts_are_simulated_in_every_precision(gpu):
    recipe = Recipe(model="mixtral-8x7b-tiny", seq_len=64, optimizer="sgd")
    fp32, amp = simulate(recipe, gpu), simulate(recipe.but(precision="fp16-amp"), gpu)
    assert fp32.breakdown["parameters"] == amp.breakdown["parameters"] == 4 * fp32.parameters
    assert any("chosen evenly" in assumption for assumption in fp32.assumptions)
    if gpu != "T4":
        half = simulate(recipe.but(precision="bf16"), gpu)
        # Weights and gradients, and nearly all of what the layers keep.
        assert half.peak_tensors == pytest.approx(fp32.peak_tensors / 2, rel=0.02)
