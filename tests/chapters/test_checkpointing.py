"""Chapter 8: its from-scratch checkpoint is right, its switch the library's."""

import pytest
import torch
from notebook import assert_steps_agree, cells_of
from segments_twin import figures

from memlab import Recipe
from memlab.workloads.training import Training

chapter = cells_of(
    "08-checkpointing", "imports settings from-scratch ways-code count held on-demand by-hand"
)


deeper = cells_of("08-checkpointing-deeper", "imports double-run")


def gradients(forward, layers, x):
    layers.zero_grad()
    x = x.clone().requires_grad_()
    forward(layers, x).square().sum().backward()
    return [x.grad, *(weight.grad for weight in layers.parameters())]


def test_every_way_gives_the_gradient_of_ordinary_training(chapter):
    torch.manual_seed(0)
    layers, x = chapter["make_layers"](7, width=8), torch.randn(5, 8)
    right = gradients(chapter["keep_all"], layers, x)
    segments = chapter["segments_of"]
    for way in (segments(1), segments(3), chapter["OnDemand"].apply):
        torch.testing.assert_close(gradients(way, layers, x), right)


@pytest.mark.parametrize("depth, reentrant", [(0, True), (1, False), (2, True), (2, False)])
def test_checkpoints_in_checkpoints_do_so_too(chapter, deeper, depth, reentrant):
    def way(layers, x):
        nested = [deeper["nested"](layer, depth, reentrant) for layer in layers]
        return chapter["keep_all"](nested, x)

    layers, x = chapter["make_layers"](3, width=8), torch.randn(5, 8)
    found = gradients(way, layers, x)
    torch.testing.assert_close(found, gradients(chapter["keep_all"], layers, x))


@pytest.mark.parametrize("layers, segment", [(9, 0), (16, 1), (16, 4), (9, 9)])
def test_a_simulated_chain_holds_what_the_panel_says(chapter, layers, segment):
    way = chapter["segments_of"](segment) if segment else chapter["keep_all"]
    beyond = chapter["held"](way, layers) - figures(layers, segment, 4)["peak"]
    assert 6 <= beyond <= 8.1  # two wide gradients, one or two narrow ones, a buffer of sums


@pytest.mark.parametrize("model", ["bert-large", "gpt2"])
def test_wrapped_layers_and_the_recipe_agree(chapter, model):
    recipe = Recipe(model, batch_size=4).twin(seq_len=64)
    by_hand, by_switch = Training(recipe), Training(recipe.but(checkpointing=True))
    chapter["checkpoint_layers"](chapter["layers_of"](by_hand.model))
    assert_steps_agree(by_hand, by_hand.step, by_switch)
