"""Chapter 8: its from-scratch checkpoint is right, its laws are counted, its verdicts stand."""

import pytest
import torch
from notebook import Notebook

from memlab import Recipe, simulate
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

CHAPTER = Notebook("08-checkpointing")
DEEPER = Notebook("08-checkpointing-deeper")
SMALL = """imports from-scratch chain ways-code on-demand-code toy-measures ways real-layers
    by-hand same corpus kinds gradients lora-code selective"""


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(SMALL)


def gradients(forward, layers, x):
    layers.zero_grad()
    x = x.clone().requires_grad_()
    forward(layers, x).square().sum().backward()
    return [x.grad, *(weight.grad for weight in layers.parameters())]


@pytest.mark.parametrize("way", ["every", "segments", "on demand"])
def test_every_way_gives_the_gradient_of_ordinary_training(chapter, way):
    torch.manual_seed(0)
    layers, x = chapter["make_layers"](7, width=8), torch.randn(5, 8)
    forward = {
        "every": chapter["segments_of"](1),
        "segments": chapter["segments_of"](3),
        "on demand": chapter["OnDemand"].apply,
    }[way]
    right = gradients(chapter["keep_all"], layers, x)
    for found, wanted in zip(gradients(forward, layers, x), right, strict=True):
        torch.testing.assert_close(found, wanted)


def test_memory_follows_the_law(chapter):
    held, trial, segments = chapter["held"], chapter["trial"], chapter["segments_of"]
    every = [held(trial(segments(1), n)) for n in (4, 9, 16)]
    assert (every[1] - every[0], every[2] - every[1]) == pytest.approx((5, 7), abs=0.01)
    roots = [held(trial(segments(k), k * k)) for k in (2, 3, 4)]
    assert roots[2] - roots[1] == pytest.approx(roots[1] - roots[0], abs=0.01)
    everything = [held(trial(chapter["keep_all"], n)) for n in (4, 9)]
    assert everything[1] - everything[0] == pytest.approx(4 * 5, abs=0.01)
    assert held(trial(chapter["OnDemand"].apply, 9)) < min(every[1], roots[1])


def test_work_in_forward_passes(chapter):
    passes, segments = chapter["passes"], chapter["segments_of"]
    assert passes(chapter["keep_all"], 8) == pytest.approx(3)
    assert [passes(segments(k), 8) for k in (1, 2, 8)] == pytest.approx([4, 4, 4])
    assert passes(chapter["OnDemand"].apply, 8) == pytest.approx(3 + (8 + 1) / 2)
    frozen = [passes(way, 8, frozen=True) for way in (chapter["keep_all"], segments(1))]
    assert frozen == pytest.approx([2, 3])  # a half more, as under LoRA


def test_the_lines_of_llamas_layers_go_on_as_they_begin(chapter):
    """Two and four segments are simulated; the page goes on to 80 layers, here it is 16."""
    held = chapter["llama_layers"]
    for k in (1, 2):
        two, four, far = (held(n, k) for n in (2 * k, 4 * k, 16))
        assert far == pytest.approx(two + (four - two) * (16 - 2 * k) / (2 * k), abs=0.01)
    a_layer = (held(4, 0) - held(2, 0)) / 2
    assert a_layer == pytest.approx(24.3, abs=0.1)  # so two are better from 49 layers on


def test_the_film_names_what_each_bar_is(chapter):
    CHAPTER.run("film", chapter)
    for way, again in ((chapter["keep_all"], False), (chapter["segments_of"](2), True)):
        line = chapter["trial"](way, 4).timeline
        kinds = {chapter["kind_of"](x, line) for x in line.lives if x.module[:1].isdigit()}
        assert ("computed again" in kinds) is again and kinds <= set(chapter["KINDS"])


@pytest.mark.parametrize("model, layers", [("bert-large", "bert.encoder.layer"), ("gpt2", None)])
def test_wrapped_layers_and_the_recipe_agree(chapter, model, layers):
    recipe = Recipe(model, batch_size=4).twin(seq_len=64)
    by_hand, by_switch = Training(recipe), Training(recipe.but(checkpointing=True))
    stack = by_hand.model.get_submodule(layers or "transformer.h")
    chapter["checkpoint_layers"](stack)
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


def test_the_random_state_decides_the_gradient(chapter):
    assert chapter["off"]["checkpointing"] < 1e-6
    assert chapter["off"]["state forgotten"] > 0.1


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_the_reentrant_form_trains_nothing_under_frozen_inputs_and_is_fixed(chapter):
    share = chapter["trained_share"]
    assert share(True) == "2 of 18"
    assert share(True, wants_gradient=True) == share(False) == "18 of 18"


def test_a_cache_fails_under_wrapped_layers_and_is_fixed(chapter):
    chapter["device"] = torch.device("cpu")
    CHAPTER.run("cache", chapter)
    step = chapter["cached_step"]
    with pytest.raises((RuntimeError, torch.utils.checkpoint.CheckpointError)):
        step(chapter["by_wrapping"], use_cache=True)
    assert step(chapter["by_wrapping"], use_cache=False) == "fine, cache: False"
    assert step(chapter["by_switching"], use_cache=True) == "fine, cache: False"


def test_selective_checkpointing_lies_between(chapter):
    CHAPTER.run("selective-table selective-said", chapter)  # asserts that sdpa has less to win
    for row in chapter["finer"].values():
        assert 10 < row["freed, %"] < 90 and -0.01 < row["more work, %"] < 10
    trial = chapter["selective_trial"]
    (kept, work), (every, most) = trial("sdpa", 128), trial("sdpa", 128, **chapter["RIGHT"])
    assert kept > every and work < most < 1.34 * work


def test_a_smaller_budget_saves_less_and_computes_more(chapter):
    CHAPTER.run("budget-run", chapter)
    saved, operations = zip(
        *(chapter["planned"](budget) for budget in (1.0, 0.5, 0.0)), strict=True
    )
    assert saved[0] > saved[1] > saved[2] == pytest.approx(1, abs=0.1)  # the input alone
    assert operations[0] < operations[1] < operations[2] < 1.34 * operations[0]


@pytest.fixture(scope="module")
def deeper():
    return DEEPER.run("imports offload-ways encoder offload-trial offload-work nested")


def test_offloading_frees_the_card_and_counts_what_travels(deeper):
    tried = {name: deeper["offload_trial"](name, 3) for name in deeper["WAYS"]}
    kept, moved, marked, both = (run.breakdown["activations"] for run, _ in tried.values())
    assert moved < marked < kept and both < marked
    assert tried["checkpointing"][1] == [32 * 512 * 768 * 4] * 3  # the inputs of three layers
    assert sum(tried["all kept"][1]) > 10 * sum(tried["checkpointing"][1])
    # Of a layer: 4 x 768 ** 2 and 8 x 768 ** 2 weights and two products with the tokens.
    once = 2 * 32 * 512 * (12 * 768**2 + 2 * 512 * 768)
    assert deeper["operations"](1) == pytest.approx(3 * once, rel=0.1)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_checkpoints_keep_the_gradient(chapter, deeper, depth, reentrant):
    torch.manual_seed(0)
    layers, x = chapter["make_layers"](3, width=8), torch.randn(5, 8)

    def forward(layers, x):
        for layer in layers:
            x = deeper["nested"](layer, depth, reentrant)(x)
        return x

    right = gradients(chapter["keep_all"], layers, x)
    for found, wanted in zip(gradients(forward, layers, x), right, strict=True):
        torch.testing.assert_close(found, wanted)


def test_only_the_reentrant_form_computes_a_nested_segment_again(deeper):
    DEEPER.run("double-run double-words", deeper)  # asserts
    assert deeper["counted"]["reentrant"].tolist() == pytest.approx([3, 4, 5])


def test_checkpointing_learns_the_same_over_three_seeds(chapter):
    CHAPTER.run("learn", chapter)
    for seed in range(3):
        one, other = (chapter["learn"](seed, way, steps=6) for way in ({}, chapter["RIGHT"]))
        assert one == pytest.approx(other, abs=1e-3)
        assert one < 6.2  # a uniform guess over 512 tokens costs 6.24 nats


@pytest.mark.parametrize("number, wrong", [(1, 4), (2, 10.07), (3, 4)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    if number == 2:
        changes = {"precision": "bf16", "attention": "sdpa", "checkpointing": True}
        chapter["short"] = simulate(Recipe("gpt2-xl", None, 32, 1024, **changes))
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


@pytest.mark.slow
def test_verdicts(chapter):
    CHAPTER.run("law-run law-slopes price real-run flops-run measure-words", chapter)
    before, after = chapter["alone"].figures, chapter["marked"].figures
    chapter["seconds"] = after["run_seconds"] / before["run_seconds"]
    chapter["rate"] = after["samples_per_second"] / before["samples_per_second"]
    words = {"A10": "holds with a condition", "B13": "holds with a condition", "E24": "holds"}
    for id, word in words.items():
        assert CHAPTER.verdict(id, chapter) == word
    assert abs(chapter["off_by"]) < 0.02
    # Every layer is best up to twice what a layer keeps, in inputs; sdpa keeps less than eager.
    for attention, ratio in chapter["ratios"].items():
        assert chapter["cross"][attention] == pytest.approx(2 * ratio, rel=0.1)
    assert chapter["ratios"]["sdpa"] == pytest.approx(16, abs=0.2)
    assert chapter["ratios"]["eager"] == pytest.approx(24, abs=0.2)


@pytest.mark.parametrize("kind", ["none", "non-reentrant", "reentrant"])
def test_prediction_and_measurement_agree_in_every_category(chapter, kind):
    CHAPTER.run("same", chapter)
    recipe = chapter["kept_recipe"].but(checkpointing=kind)
    training = Training(recipe)
    for _ in range(2):
        training.step()
    tracer = Tracer()
    tracer.watch(training.model, training.optimizer, training.inputs)
    with tracer:
        training.step()
    found, guess = tracer.footprint(), simulate(recipe)
    # Beyond the tensors: AdamW's step counters, which CUDA keeps on the host, and losses.
    for name in ("parameters", "gradients", "activations", "temporary", "inputs", "buffers"):
        assert abs(guess.breakdown[name] - found.breakdown[name]) < 64, name
    counters = 4 * len(list(training.model.parameters()))
    states = found.breakdown["optimizer_states"] - guess.breakdown["optimizer_states"]
    assert states == counters
