"""Chapter 5: what its cells show is true, and its frozen training is the one that memlab runs."""

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, models, simulate
from memlab.book import small_config, three_steps, train_step
from memlab.workloads.training import Training

CHAPTER = Notebook("05-freezing")
# Cells that train tiny models only, in the order of the chapter.
TINY = """imports imports-memlab published-freezing toy-run reached small-deberta ask
    mended-freezing mended vanilla-start corpus fit pretrain fine-tune norms tied
    late-freeze-run asleep-run"""


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(TINY, {"device": torch.device("cpu")})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["bert-large-tiny", "deberta-v3-base-tiny"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_shown_code_and_the_recipe_agree(chapter, model, layers):
    recipe = Recipe(model, batch_size=2, seq_len=32)
    shown = Training(recipe)
    shown.optimizer = chapter["frozen_start"](shown.model, layers)
    library = Training(recipe.but(freeze=("embeddings", layers)))

    def shown_step():
        return train_step(shown.model, shown.optimizer, shown.batches[0])

    assert_same_run(traced(shown, shown_step), traced(library, library.step))


def test_a_layer_keeps_by_what_trains_below_it(chapter):
    kept = chapter["kept"]
    whole = kept["all train"][0]
    assert kept["all train"] == [whole] * 6
    assert kept["lower half"] == [0] * 3 + [whole] * 3
    upper = kept["upper half"]
    assert upper[:3] == [whole] * 3 and 0 < upper[3] < whole and upper[3:] == [upper[3]] * 3
    assert kept["all but lowest"] == [whole] + [upper[3]] * 5


def test_the_published_code_leaves_backward_to_the_first_layer(chapter):
    reached = chapter["reached_in"]
    assert reached(chapter["freeze_as_published"])[1] == [True] * 4
    assert reached(chapter["freeze_low"])[1] == [False, False, True, True]


def test_the_relative_positions_decide_about_the_activations_of_frozen_layers():
    recipe = Recipe("deberta-v3-base-tiny", batch_size=4, seq_len=64)
    shared = ("encoder.rel_embeddings", "encoder.LayerNorm")
    parts = {"nothing": (), "published": ("embeddings", 1), "fixed": ("embeddings", 1, *shared)}
    kept = {
        name: simulate(recipe.but(freeze=freeze)).breakdown["activations"]
        for name, freeze in parts.items()
    }
    saved = {name: kept["nothing"] - kept[name] for name in ("published", "fixed")}
    assert saved["fixed"] > 0.3 * kept["nothing"] and saved["fixed"] > 1.4 * saved["published"]


def test_lower_layers_save_more_than_upper_ones_in_memory_and_operations(chapter):
    config = models.config("bert-large-tiny")
    config.num_hidden_layers = 4
    recipe = Recipe(config, batch_size=4, seq_len=64)
    names = ("embeddings", "encoder.layer.2", "encoder.layer.3")
    none, lower, upper = (
        simulate(recipe.but(freeze=parts), gpu="T4")
        for parts in ("embeddings", ("embeddings", 2), names)
    )
    assert lower.trainable_parameters == upper.trainable_parameters
    assert lower.breakdown["activations"] < 0.6 * none.breakdown["activations"]
    assert upper.breakdown["activations"] > 0.75 * none.breakdown["activations"]

    work = [run.step_time.flops for run in (lower, upper, none)]
    assert work[0] < work[1] < work[2]


def test_operations_of_frozen_layers_are_those_of_their_forward_pass():
    recipe = Recipe("bert-large-tiny", batch_size=4, seq_len=64)
    whole, forward = (
        simulate(recipe.but(freeze=parts), gpu="T4").step_time.flops
        for parts in ("embeddings", "backbone")
    )
    assert forward / whole == pytest.approx(1 / 3, 0.05)


def test_prediction_and_measurement_of_the_twin_agree(chapter):
    chapter["fused"] = dict(optimizer="adamw_torch_fused")
    CHAPTER.run("live", chapter)
    for name, (guess, found) in chapter["live"].items():
        for part in ("parameters", "gradients", "inputs", "buffers"):
            assert guess.breakdown[part] == found.breakdown[part], (name, part)
        # A T4's fused attention keeps other sums of its rows than a CPU's.
        assert guess.breakdown["activations"] == pytest.approx(
            found.breakdown["activations"], rel=0.02
        )
    assert set(chapter["took"].index) == {*chapter["choices"], "control"}


def test_gradients_vanish_only_without_residual_connections(chapter):
    norms = chapter["norms"]
    assert norms["sigmoid stack"][0] < 1e-6 * norms["sigmoid stack"][-1]
    for name, found in norms.items():
        if name != "sigmoid stack":
            assert found[0] > (0.5 if "BERT" in name else 0.01) * found[-1], name


def test_under_adamw_the_lowest_layer_moves_about_as_much_as_the_top(chapter):
    CHAPTER.run("change-run change-words", chapter)
    low, *_, high = chapter["moved"]["AdamW"]
    assert low > 0.5 * high and low > 0.01
    assert not chapter["vanish"] and not chapter["stand"]  # as the text says


@pytest.mark.slow
def test_freezing_costs_nothing_on_the_near_task_and_much_on_the_far_one(chapter):
    CHAPTER.run("learn-run learn-words", chapter)  # asserts
    mean = {key: sum(found) / len(found) for key, found in chapter["scores"].items()}
    assert all(len(found) == 3 for found in chapter["scores"].values())
    assert mean["near", "nothing"] > 0.7
    assert mean["near", "nothing"] - mean["near", "both"] < 0.06
    assert mean["far", "nothing"] - mean["far", "both"] > 0.06


def test_tied_embeddings_bring_backward_to_the_bottom(chapter):
    head_only = chapter["gpt2_head_only"]
    assert head_only(tied=True) == [True, True]
    assert head_only(tied=False) == [False, False]


def test_zeros_for_gradients_move_a_weight_frozen_late(chapter):
    drift = chapter["drift"]
    assert drift["zeros, no decay"] > 0.05 and drift["zeros, decay 0.1"] > 0.05
    assert drift["dropped (fixed)"] == 0


def test_frozen_batch_statistics_drift_and_dropout_draws_until_eval(chapter):
    apart, drifted = chapter["restless"][False]
    assert apart > 0.1 and drifted > 0.1
    assert chapter["restless"][True] == (0, 0)


def test_the_trainer_moves_what_is_not_frozen(chapter):
    chapter |= {"silent": Recipe("bert-large-tiny")}
    CHAPTER.run("trainer-train", chapter)
    assert chapter["still"] == chapter["resting"] and chapter["given"] == chapter["free"]


def test_what_is_frozen_in_16_bits_and_its_border():
    space = CHAPTER.run("imports imports-memlab half-freeze")
    model = models.build(small_config("bert-large-tiny", num_hidden_layers=3))
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.tensor([0, 1])}
    whole = model(**batch).loss
    base = model.base_model.requires_grad_(False)
    space["halve_frozen"](base, 2, torch.bfloat16)
    assert base.embeddings.word_embeddings.weight.dtype == torch.bfloat16
    dtypes = [next(layer.parameters()).dtype for layer in base.encoder.layer]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    loss = model(**batch).loss
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(whole.item(), abs=0.02)


def test_features_computed_once_give_the_loss_of_the_whole_model(chapter):
    CHAPTER.run("cache cache-run", chapter)
    assert chapter["ratio"] < 0.7
    model = chapter["model"]
    grads = model.classifier.weight.grad.clone()
    model.zero_grad()
    chapter["anew"]()
    chapter["anew"]()
    assert grads.norm() > 0 and all(p.grad is None for p in model.bert.encoder.parameters())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number, before, wrong", [(1, "", 375.3), (2, "", 0.75), (3, "buggy", 16)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(
    chapter, capsys, number, before, wrong
):
    if number == 2:
        recipe = Recipe("bert-large", batch_size=1)
        chapter["depths"] = {
            n: simulate(recipe.but(freeze=("embeddings", n)), gpu="T4") for n in (0, 6)
        }
    CHAPTER.run(before, chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)


def test_without_a_fused_attention_the_frozen_twin_agrees_to_the_byte():
    config = small_config("bert-large-tiny", num_hidden_layers=3)
    recipe = Recipe(config, batch_size=8, seq_len=64, freeze=("embeddings", 2))
    training = Training(recipe)
    guess, found = simulate(recipe, gpu="T4"), three_steps(training)[1]
    for part in ("parameters", "gradients", "activations", "inputs", "buffers"):
        assert guess.breakdown[part] == found.breakdown[part], part
    # AdamW's step counters, which CUDA keeps on the host.
    trained = [p for p in training.model.parameters() if p.requires_grad]
    states = found.breakdown["optimizer_states"] - guess.breakdown["optimizer_states"]
    assert states == 4 * len(trained)
