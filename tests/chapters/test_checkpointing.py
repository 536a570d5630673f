"""Chapter 8: its from-scratch checkpoint is right, its laws are counted, its verdicts stand."""

import pytest
import torch
from notebook import Notebook

import memlab
from memlab import Recipe, models, simulate
from memlab.book.chapters import checkpointing
from memlab.book.chapters.checkpointing import held, make_layers, passes
from memlab.trace.tracer import Tracer
from memlab.workloads.training import Training

CHAPTER = Notebook("08-checkpointing")
SMALL = "imports from-scratch ways-code by-hand same gradients"


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(SMALL, {"memlab": memlab})


def gradients(forward, layers, x):
    layers.zero_grad()
    x = x.clone().requires_grad_()
    forward(layers, x).square().sum().backward()
    return [x.grad, *(weight.grad for weight in layers.parameters())]


@pytest.mark.parametrize("k", [1, 3])
def test_every_segment_gives_the_gradient_of_ordinary_training(chapter, k):
    torch.manual_seed(0)
    layers, x = make_layers(7, width=8), torch.randn(5, 8)
    right = gradients(chapter["keep_all"], layers, x)
    found = gradients(chapter["segments_of"](k), layers, x)
    torch.testing.assert_close(found, right)


def test_memory_follows_the_law(chapter):
    segments = chapter["segments_of"]
    every = [held(segments(1), n) for n in (4, 9, 16)]
    assert (every[1] - every[0], every[2] - every[1]) == pytest.approx((5, 7), abs=0.01)
    for k in (2, 3, 4):  # the best segment of 4k**2 layers: 4 sqrt(n) and seven
        assert held(segments(k), 4 * k * k) == pytest.approx(8 * k + 7, abs=0.01)
    everything = [held(chapter["keep_all"], n) for n in (4, 9)]
    assert everything[1] - everything[0] == pytest.approx(4 * 5, abs=0.01)


def test_work_in_forward_passes(chapter):
    segments = chapter["segments_of"]
    assert [passes(segments(k), 8) for k in (1, 2, 8)] == pytest.approx([4, 4, 4])
    frozen = [passes(way, 8, frozen=True) for way in (chapter["keep_all"], segments(1))]
    assert frozen == pytest.approx([2, 3])  # a half more, as under LoRA


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


def test_the_random_state_decides_the_gradient(chapter):
    CHAPTER.run("gradients-run", chapter)
    assert chapter["off"]["checkpointing"] < 1e-6
    assert chapter["off"]["forgotten"] > 0.1


def test_a_cache_fails_under_wrapped_layers_and_not_without(chapter, capsys):
    CHAPTER.run("cache", chapter | {"device": torch.device("cpu")})
    off, on = capsys.readouterr().out.splitlines()
    assert off == "cache False fine" and on.startswith("cache True") and "fine" not in on


def test_the_switch_turns_the_cache_off():
    llama = models.build("llama-3.2-1b-tiny").train()
    checkpointing.switch_on(llama)
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
            checkpointing.switch_on(llama)
        read = torch.ones(2, 64, dtype=torch.long)
        with memlab.Meter("cpu", llama) as meter:
            llama(input_ids=read, labels=read).loss.backward()
        held.append(meter.footprint.breakdown["activations"])
    assert (held[1] < held[0] / 2) == saves and (held[1] == held[0]) != saves


def test_selective_checkpointing_lies_between(chapter):
    names = CHAPTER.run("selective", chapter)
    sdpa, eager = (names["finer"][kernel] for kernel in ("sdpa", "eager"))
    for row in (sdpa, eager):
        assert 0.1 < row["freed"] < 0.9 and -1e-4 < row["more work"] < 0.1
    assert sdpa["kept"] < eager["kept"]


def test_steps_of_the_trainer_are_the_same(chapter, capsys):
    CHAPTER.run("trainer", chapter)
    kept, marked = (line.split()[1:] for line in capsys.readouterr().out.splitlines()[-2:])
    assert [*map(float, kept)] == pytest.approx([*map(float, marked)], rel=1e-3)


@pytest.mark.parametrize("number, wrong", [(1, 4), (2, 10.07), (3, 4)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(chapter, capsys, number, wrong):
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


@pytest.mark.slow
def test_verdicts(chapter):
    CHAPTER.run("law-slopes price real-run flops-run measure-words", chapter)
    words = {"A10": "holds with a condition", "B13": "holds with a condition", "E24": "holds"}
    for id, word in words.items():
        assert CHAPTER.verdict(id, chapter) == word
    assert abs(chapter["marked"]["ratio"] - 1) < 0.02
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
