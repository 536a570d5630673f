"""The tracer against another way of counting the same bytes, PyTorch's profiler."""

import gc
from collections import Counter

import pytest
import torch

from memlab import Recipe
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

RECIPES = {
    "plain": {},
    "loop": {"optimizer": "adamw_torch_loop"},
    "accumulation": {"accumulation": 3},
    "non-reentrant": {"checkpointing": "non-reentrant"},
    "reentrant": {"checkpointing": "reentrant"},
    "bf16 autocast": {"precision": "bf16-amp"},
    "sdpa": {"attention": "sdpa"},
    "causal": {"model": "gpt2-tiny"},
    "grouped heads in bf16": {"model": "llama-3-8b-tiny", "precision": "bf16"},
    "masked": {"task": "masked-lm"},
    "linear cross-entropy": {"model": "llama-3-8b-tiny", "loss": "linear_cross_entropy"},
    "linear cross-entropy, padded": {
        "model": "gpt2-tiny",
        "loss": "linear_cross_entropy",
        "padded": True,
    },
    "steps in backward": {"step_in_backward": True},
}


def prepared(name):
    recipe = RECIPES[name]
    base = {"model": "bert-large-tiny", "batch_size": 4, "seq_len": 128}
    if "model" not in recipe:
        base["task"] = "sequence-classification"
    training = Training(Recipe(**(base | recipe)))
    if training.recipe.checkpointing != "none":
        # A checkpoint keeps the state of the CPU's random numbers, a tensor made without any
        # operation, which only the profiler sees. On CUDA it stays on the host.
        training.model.activation_checkpointing_enable(
            {
                "use_reentrant": training.recipe.checkpointing == "reentrant",
                "preserve_rng_state": False,
            }
        )
    training.step()
    gc.collect()
    return training


def traced(training):
    tracer = Tracer()
    tracer.watch(training.model, training.optimizer, training.inputs)
    with tracer:
        training.step()
    return tracer.footprint()


def test_states_that_an_optimizer_has_already_count_where_it_is_watched():
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    for watched in ({"optimizer": optimizer}, {"inputs": [weight.grad]}):
        tracer = Tracer()
        tracer.watch(**watched)
        with tracer:
            torch.ones(10)
        states = 4 * (2 * 1000 + 1) if "optimizer" in watched else 0  # two moments, and the step
        assert tracer.footprint().breakdown["optimizer_states"] == states


def profiler_peak(training):
    tensors = [*training.model.parameters(), *training.model.buffers(), *training.inputs]
    tensors += [v for state in training.optimizer.state.values() for v in state.values()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        training.step()
    level = peak = sum(storages.values())
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RECIPES)
def test_peak_equals_the_profiler_but_for_scalars(name):
    if "linear" in name and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("it came with PyTorch 2.13")
    # The profiler also sees a few scalars that are made below the dispatcher, 8 bytes each.
    difference = profiler_peak(prepared(name)) - traced(prepared(name)).peak_allocated
    assert 0 <= difference <= 128


def test_categories_without_being_told():
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    x = torch.ones(1000)
    with Tracer() as tracer:
        y = (weight * x).sin()
        y.sum().backward()
        optimizer.step()
    assert [s.category for s in tracer.storages].count("parameters") == 1
    sizes = Counter()
    for storage in tracer.storages:
        sizes[storage.category] += storage.nbytes
    assert sizes["parameters"] == sizes["gradients"] == sizes["optimizer_states"] == 4000
    assert sizes["inputs"] == 4000
    assert (
        sizes["activations"] == 4000 + 4000 + 4 + 4
    )  # weight * x, its sine, the sum, its gradient 1


def test_the_gradients_of_a_tied_weight_are_added_into_a_new_tensor():
    """As on a recorded H100: the head's gradient is a view, whose base holds its storage, too."""
    table = torch.nn.Embedding(1000, 16)

    def loss():
        return torch.nn.functional.linear(table(torch.arange(3)), table.weight).sum()

    loss().backward()
    table.weight.grad = None
    sum_of_both = loss()
    with Tracer() as tracer:
        sum_of_both.backward()
    large = [entry.change for entry in tracer.entries if abs(entry.change) == 64_000]
    assert large == [64_000] * 3 + [-64_000] * 2


def test_phases_are_in_order():
    spans = traced(prepared("plain")).timeline.spans()
    order = [phase for phase, start, end in spans if end - start > 20]
    assert order == ["forward", "backward", "optimizer step", "zero_grad"]


def test_the_tracer_keeps_nothing_alive():
    with Tracer():
        x = torch.zeros(1000)
        storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
        del x
        assert storage.expired()


def test_a_parameter_that_is_given_other_data_stays_a_parameter():
    layer = torch.nn.Linear(64, 64, bias=False)
    with Tracer() as tracer:
        layer(torch.randn(2, 64)).sum().backward()
        layer.weight.data = layer.weight.data.to(torch.float64)
        layer.weight.grad = None
        layer(torch.randn(2, 64, dtype=torch.float64)).sum().backward()
    levels = tracer.footprint().timeline.levels
    assert levels["parameters"][-1] == levels["gradients"][-1] == 8 * 64 * 64
