"""Deep models from shallow logs: byte for byte what their full depth gives."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers

from memlab import Recipe, models, simulate
from memlab.card.device import SimulatedGPU
from memlab.gpus import ANY_CARD
from memlab.predict.layer_patterns import layers_of
from memlab.predict.recipe_log import with_all_micro_batches
from memlab.predict.run import log_of, two_steps
from memlab.predict.simulate import serve
from memlab.predict.trace_recorder import run_log
from memlab.predict.widths import shapes_of
from memlab.trace.layered import LayeredLog
from memlab.trace.log import Log

FULL = {"optimizer": "adamw_torch_loop", "accumulation": 2}
FROZEN = {"freeze": "embeddings", "optimizer": "adamw_torch_fused"}
LORA = {"lora_rank": 8, "lora_dropout": 0.1, "precision": "bf16", "attention": "sdpa"}
CHECKPOINTED = {"checkpointing": True, "precision": "fp16-amp"}
ZERO3 = {"ranks": 4, "sharding": "zero3", "checkpointing": True}


@pytest.fixture(autouse=True)
def six_layers_are_deep(monkeypatch):
    monkeypatch.setattr("memlab.predict.recipe_log.MAX_LAYERS_TO_RUN", 5)


def deep(model, layers=6):
    return models.with_layers(model, layers)


def at_full_depth(recipe, gpu=None):
    with SimulatedGPU(gpu, ranks=recipe.ranks) as simulated:
        training = two_steps(recipe, simulated)
        return replace(
            simulated.footprint,
            parameters=training.parameters,
            trainable_parameters=training.trainable_parameters,
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt2-xl", FULL),
        ("gpt2-xl", {"lora_rank": 8}),
        ("bert-large", FROZEN),
        ("bert-large", {"optimizer": "adamw_8bit"}),
        ("llama-3.2-3b", LORA),
        ("llama-3.2-3b", CHECKPOINTED | {"lora_rank": 8}),
        ("qwen2.5-1.5b", {"checkpointing": "reentrant", "optimizer": "sgd"}),
        ("deberta-v3-base", {}),
        ("mixtral-8x7b", LORA | {"lora_targets": "q_proj"}),
        ("llama-3-8b-tiny", ZERO3),
        ("llama-3-8b-tiny", ZERO3 | {"max_grad_norm": 1.0, "lora_rank": 4}),
    ],
)
def test_it_equals_full_depth(model, changes):
    recipe = Recipe(model=deep(model), seq_len=64, **changes)
    assert layers_of(recipe)
    stretched, full = (run(recipe, "A100-80GB") for run in (simulate, at_full_depth))
    assert stretched.step_seconds.expected == pytest.approx(full.step_seconds.expected)
    assert stretched.step_seconds.flops == full.step_seconds.flops
    assert replace(stretched, step_time=None) == replace(full, step_time=None)
    assert stretched.timeline.phases == full.timeline.phases


def test_biases_that_are_cast_among_scales_of_their_size():
    """A quantized base whose biases leave their first dtype one by one, and its codes stay."""
    recipe = Recipe(deep("qwen2.5-7b"), seq_len=64, base="nf4", double_quant=True, lora_rank=8)
    direct = with_all_micro_batches(recipe, log_of(recipe, numbered=True))
    assert serve(recipe, run_log(recipe, ANY_CARD), ANY_CARD) == serve(recipe, direct, ANY_CARD)


@pytest.mark.slow
def test_an_encoder_and_a_decoder_grow_together():
    recipe = Recipe(model=deep("t5-3b"), seq_len=64, checkpointing=True)
    assert simulate(recipe) == at_full_depth(recipe)
    assert layers_of(recipe).before == 1  # only first layers know distances
    uneven = models.config(recipe.model)
    uneven.num_decoder_layers = 2
    assert not layers_of(Recipe(model=uneven, seq_len=64))


def test_it_runs_out_of_memory_on_the_same_request():
    recipe = Recipe(model=deep("gpt2-medium"), seq_len=128)
    messages = []
    for run in (simulate, at_full_depth):
        with pytest.raises(torch.OutOfMemoryError) as error:
            run(recipe, 2**30)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert simulate(recipe, 8 * 2**30).peak_reserved <= 8 * 2**30


def test_layers_that_alternate_are_a_pattern():
    recipe = Recipe(deep("gemma-2-2b"), seq_len=64, precision="bf16")
    assert layers_of(recipe).period == 2
    assert simulate(recipe) == at_full_depth(recipe)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "bert-large", "freeze": "embeddings,3"},  # three layers are not like the others
        {"model": "bert-large", "ranks": 2},  # gradients share buckets across layers
        {"model": "bert-large", "ranks": 2, "sharding": "zero1"},
    ],
)
def test_what_it_leaves_to_the_full_depth(changes):
    assert not layers_of(Recipe(**{"seq_len": 64} | changes))


def log(letters):
    return Log(list(letters), Counter({(10, False): 1, (5, True): letters.count("f")}))


@pytest.mark.parametrize(
    "logs",
    [
        ("ofh", "offh", "offgh"),  # another event than before
        ("ofh", "offh", "offffh"),  # two more at once
        ("ofxh", "offh", "offfh"),  # two layers do what three do not
    ],
)
def test_no_log_without_a_pattern(logs):
    assert LayeredLog.of([log(letters) for letters in logs], 2) is None


@pytest.mark.parametrize(
    "logs",
    [
        ("ofh", "offh", "offffh"),
        ("ofh", "ofgfh", "ofgfgfgfh"),  # what lies between two layers is there once
        ("ofhbu", "ofgfhbcbu", "ofgfgfgfhbcbcbcbu"),
    ],
)
def test_two_depths_are_enough_beside_a_check(logs):
    shallow, deeper, deep = map(log, logs)
    layered = LayeredLog.of([shallow, deeper], 2)
    assert [layered.kinds[kind] for kind in layered.order_at(4)] == deep.steps
    assert layered.counted(layered.weights, 4) == deep.weights


@pytest.mark.parametrize(
    ("config", "late"),
    [(transformers.Qwen3NextConfig(), (256,)), (transformers.JambaConfig(), (1024, 4096))],
    ids=lambda it: getattr(it, "model_type", ""),
)
def test_shapes_of_layers_that_come_late_are_seen(config, late):
    """The norm of a head of every fourth layer; keys of every eighth."""
    assert list(late) in shapes_of(config, "causal-lm")
    with torch.device("meta"):
        first = models.build(models.with_layers(config, 2), "causal-lm")
    assert late not in {tuple(weight.shape) for weight in first.parameters()}
