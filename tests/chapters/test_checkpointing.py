"""Chapter 8: its from-scratch checkpoint is right, its law is counted."""

import pytest
import torch
from notebook import Notebook

import memlab
from memlab import Recipe, models
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

CHAPTER = Notebook("08-checkpointing")
DEEPER = Notebook("08-checkpointing-deeper")


@pytest.fixture(scope="module")
def chapter():
    cells = "imports settings from-scratch ways-code count held on-demand by-hand"
    return CHAPTER.run(cells)


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports double-run")


def gradients(forward, layers, x):
    layers.zero_grad()
    x = x.clone().requires_grad_()
    forward(layers, x).square().sum().backward()
    return [x.grad, *(weight.grad for weight in layers.parameters())]


@pytest.mark.parametrize("k", [1, 3])
def test_every_segment_gives_the_gradient_of_ordinary_training(chapter, k):
    torch.manual_seed(0)
    layers, x = chapter["make_layers"](7, width=8), torch.randn(5, 8)
    right = gradients(chapter["keep_all"], layers, x)
    found = gradients(chapter["segments_of"](k), layers, x)
    torch.testing.assert_close(found, right)
    walked = gradients(chapter["OnDemand"].apply, layers, x)
    torch.testing.assert_close(walked, right)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_in_checkpoints_give_the_gradient_of_ordinary_training(
    chapter, deeper, depth, reentrant
):
    def way(layers, x):
        nested = [deeper["nested"](layer, depth, reentrant) for layer in layers]
        return chapter["keep_all"](nested, x)

    layers, x = chapter["make_layers"](3, width=8), torch.randn(5, 8)
    found = gradients(way, layers, x)
    torch.testing.assert_close(found, gradients(chapter["keep_all"], layers, x))


def test_memory_follows_the_law(chapter):
    segments, held = chapter["segments_of"], chapter["held"]
    every = [held(segments(1), n) for n in (4, 9, 16)]
    assert (every[1] - every[0], every[2] - every[1]) == pytest.approx((5, 7), abs=0.01)
    for k in (2, 3, 4):  # the best segment of 4k**2 layers: 4 sqrt(n) and seven
        assert held(segments(k), 4 * k * k) == pytest.approx(8 * k + 7, abs=0.01)
    everything = [held(chapter["keep_all"], n) for n in (4, 9)]
    assert everything[1] - everything[0] == pytest.approx(4 * 5, abs=0.01)


def test_work_and_memory_of_a_walk_from_the_first_input(chapter):
    passes, walk = chapter["passes"], chapter["OnDemand"].apply
    assert passes(chapter["keep_all"], 8) == pytest.approx(3)
    assert passes(walk, 8) == pytest.approx(3 + (8 + 1) / 2)
    assert chapter["held"](chapter["keep_all"], 8) > 2 * chapter["held"](walk, 8)


@pytest.mark.parametrize("model", ["bert-large", "gpt2"])
def test_wrapped_layers_and_the_recipe_agree(chapter, model):
    recipe = Recipe(model, batch_size=4).twin(seq_len=64)
    by_hand, by_switch = Training(recipe), Training(recipe.but(checkpointing=True))
    chapter["checkpoint_layers"](chapter["layers_of"](by_hand.model))
    results = []
    for training in (by_hand, by_switch):
        torch.manual_seed(1)
        losses = [training.step(), training.step()]
        tracer = Tracer()
        tracer.watch(training.model, training.optimizer)
        with tracer:
            losses.append(training.step())
        results.append((losses, tracer.footprint().peak_allocated))
    assert results[0] == results[1]


def test_the_switch_turns_the_cache_off():
    llama = models.build("llama-3.2-1b-tiny").train()
    llama.activation_checkpointing_enable()
    read = torch.ones(2, 16, dtype=torch.long)
    out = llama(input_ids=read, labels=read, use_cache=True)
    out.loss.backward()
    assert out.past_key_values is None


@pytest.mark.parametrize(("mode", "saves"), [("train", True), ("eval", False)])
def test_a_model_in_evaluation_mode_is_not_checkpointed(mode, saves):
    held = []
    for switched in (False, True):
        llama = getattr(models.build("llama-3.2-1b-tiny"), mode)()
        if switched:
            llama.activation_checkpointing_enable()
        read = torch.ones(2, 64, dtype=torch.long)
        with memlab.Meter("cpu", llama) as meter:
            llama(input_ids=read, labels=read).loss.backward()
        held.append(meter.footprint.breakdown["activations"])
    assert (held[1] < held[0] / 2) == saves and (held[1] == held[0]) != saves
