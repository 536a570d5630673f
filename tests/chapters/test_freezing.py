"""Chapter 5: what its cells show is true, and its frozen training is the one that memlab runs."""

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, models, simulate
from memlab.training import Training

CHAPTER = Notebook("05-freezing")
# Cells that train tiny models only, in the order of the chapter.
TINY = """imports published-freezing train-step toy kept toy-run reached small-deberta ask
    mended-freezing vanilla-start corpus corpus-tokens examples reader fit accuracy pretrain tasks
    data fine-tune
    norms stacks bert-norms tied late-freeze late-freeze-run late-thaw late-thaw-run asleep
    asleep-run"""


@pytest.fixture(scope="module")
def chapter():
    return CHAPTER.run(TINY, {"device": torch.device("cpu")})


@pytest.mark.parametrize("model", ["bert-large-tiny", "deberta-v3-base-tiny"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_shown_code_and_the_recipe_agree(chapter, model, layers):
    recipe = Recipe(model, batch_size=2, seq_len=32)
    shown = Training(recipe)
    shown.optimizer = chapter["frozen_start"](shown.model, layers)
    library = Training(recipe.but(freeze=("embeddings", layers)))

    def shown_step():
        return chapter["train_step"](shown.model, shown.optimizer, shown.batches[0])

    assert_same_run(traced(shown, shown_step), traced(library, library.step))


def test_a_layer_keeps_by_what_trains_below_it(chapter):
    kept = chapter["kept"]
    whole = kept["all train"][0]
    assert kept["all train"] == [whole] * 6
    assert kept["lower half frozen"] == [0] * 3 + [whole] * 3
    upper = kept["upper half frozen"]
    assert upper[:3] == [whole] * 3 and 0 < upper[3] < whole and upper[3:] == [upper[3]] * 3
    assert kept["all but the lowest frozen"] == [whole] + [upper[3]] * 5


def test_the_published_code_leaves_backward_to_the_first_layer(chapter):
    reached, deberta = chapter["reached_in"], chapter["deberta"]
    assert reached(deberta(chapter["freeze_as_published"])) == [True] * 4
    assert reached(deberta(chapter["freeze_low"])) == [False, False, True, True]


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
        simulate(recipe.but(freeze=parts)) for parts in ("embeddings", ("embeddings", 2), names)
    )
    assert lower.trainable_parameters == upper.trainable_parameters
    assert lower.breakdown["activations"] < 0.6 * none.breakdown["activations"]
    assert upper.breakdown["activations"] > 0.75 * none.breakdown["activations"]


def test_the_curve_by_addition_is_that_of_the_whole_model(chapter):
    CHAPTER.run("choices curve-of", chapter)
    recipe = Recipe("bert-large-tiny", batch_size=8, seq_len=64)
    curve = chapter["curve_of"](recipe, 6)
    assert list(curve.index) == [1, 2, 3, 4]
    deep = models.config(recipe.model)
    deep.num_hidden_layers = 6
    whole = simulate(recipe.but(model=deep, freeze=("embeddings", 4))).breakdown
    for name in ("parameters", "gradients", "optimizer_states", "activations", "temporary"):
        assert curve[name][4] * 2**20 == pytest.approx(whole[name], abs=1), name


def test_prediction_and_measurement_of_the_twin_agree(chapter):
    CHAPTER.run("quiet", chapter)
    chapter["choices"] = {"first 2": ("embeddings", 2)}
    CHAPTER.run("live", chapter)
    guess, found = chapter["live"]["first 2"]
    trained = [p for p in chapter["training"].model.parameters() if p.requires_grad]
    for name in ("parameters", "gradients", "activations", "inputs", "buffers"):
        assert guess.breakdown[name] == found.breakdown[name], name
    # AdamW's step counters, which CUDA keeps on the host.
    states = found.breakdown["optimizer_states"] - guess.breakdown["optimizer_states"]
    assert states == 4 * len(trained)


def test_operations_fall_to_the_forward_pass(chapter):
    CHAPTER.run("flops", chapter)
    operations = chapter["operations"]
    full = operations(lambda base: base.embeddings.requires_grad_(False))
    assert operations(lambda base: base.requires_grad_(False)) / full == pytest.approx(1 / 3, 0.01)


def test_gradients_vanish_only_without_residual_connections(chapter):
    norms = chapter["norms"]
    assert norms["sigmoid stack"][0] < 1e-6 * norms["sigmoid stack"][-1]
    for name, found in norms.items():
        if name != "sigmoid stack":
            assert found[0] > (0.5 if "BERT" in name else 0.01) * found[-1], name


def test_under_adamw_the_lowest_layer_moves_about_as_much_as_the_top(chapter):
    CHAPTER.run("change-run change-table", chapter)
    low, *_, high = chapter["moved"]["AdamW"]
    assert low > 0.5 * high and low > 0.01


def test_freezing_costs_nothing_on_the_near_task_and_much_on_the_far_one(chapter):
    CHAPTER.run("learn-run", chapter)
    mean = {key: sum(found) / len(found) for key, found in chapter["scores"].items()}
    assert all(len(found) == 3 for found in chapter["scores"].values())
    assert mean["near", "nothing"] > 0.7
    assert mean["near", "nothing"] - mean["near", "all 3 layers"] < 0.06
    assert mean["far", "nothing"] - mean["far", "all 3 layers"] > 0.06


def test_tied_embeddings_bring_backward_to_the_bottom(chapter):
    reached, head_only = chapter["reached_in_gpt2"], chapter["gpt2_head_only"]
    assert reached(head_only(tied=True)) == [True, True]
    assert reached(head_only(tied=False)) == [False, False]


def test_zeros_for_gradients_move_a_weight_frozen_late(chapter):
    drift = chapter["drift"]
    assert drift["zeros, no decay"] > 0.05 and drift["zeros, decay 0.1"] > 0.05
    assert drift["dropped (fixed)"] == 0


def test_a_thawed_layer_must_be_given_to_the_optimizer(chapter):
    assert chapter["thaws"][False] == (0, True)
    moved, left = chapter["thaws"][True]
    assert moved > 0.01 and not left


def test_frozen_batch_statistics_drift_and_dropout_draws_until_eval(chapter):
    apart, drifted = chapter["restless"][False]
    assert apart > 0.1 and drifted > 0.1
    assert chapter["restless"][True] == (0, 0)


def test_the_trainer_moves_what_is_not_frozen(chapter):
    chapter |= {"silent": Recipe("bert-large-tiny")}
    CHAPTER.run("trainer-run trainer-data trainer-train accelerate accelerate-run", chapter)
    assert chapter["still"] == chapter["frozen"] and chapter["given"] == chapter["free"]
    embeddings = chapter["model"].bert.embeddings
    assert all(weight.grad is None for weight in embeddings.parameters())


@pytest.mark.parametrize(
    "number, before, wrong", [(1, "", 375.3), (2, "first-layers", 0.75), (3, "buggy", 16)]
)
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(
    chapter, capsys, number, before, wrong
):
    if number == 2:
        CHAPTER.run("flops", chapter)
        chapter["work"] = {
            0: chapter["operations"](lambda base: base.embeddings.requires_grad_(False))
        }
    CHAPTER.run(before, chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)
