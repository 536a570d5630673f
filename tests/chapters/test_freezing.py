"""Chapter 5: what its cells show is true, and its frozen training is the one that memlab runs."""

import pytest
import torch
from notebook import Notebook, assert_same_run, traced

from memlab import Recipe, models, simulate
from memlab.book import small_config, train_step
from memlab.workloads.training import Training

CHAPTER = Notebook("05-freezing")


@pytest.fixture(scope="module")
def chapter():
    before = torch.get_num_threads()
    cells = "reached small-deberta published-freezing ask mended-freezing vanilla-start tied"
    yield CHAPTER.run(f"imports {cells} pretrain fine-tune")
    torch.set_num_threads(before)  # the chapter takes one


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
    everything = torch.optim.AdamW(shown.model.parameters(), lr=1e-5)
    train_step(shown.model, everything, shown.batches[0])
    assert len(everything.state) == len(shown.optimizer.state)  # as the text says


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


def test_gradients_vanish_only_without_residual_connections_and_low_layers_move(chapter):
    CHAPTER.run("change-words", chapter)
    assert chapter["plain"] < 1e-6 and chapter["residual"] > 0.01
    assert min(chapter["wide"], chapter["tuned"], chapter["by_adam"]) > 0.5
    assert chapter["moved"][0] > 0.01
    assert not chapter["vanish"] and not chapter["stand"]  # as the text says


@pytest.mark.slow
def test_freezing_costs_nothing_on_the_near_task_and_much_on_the_far_one(chapter):
    CHAPTER.run("learn-run learn-figure learn-words", chapter)
    assert all(len(found) == 3 for found in chapter["scores"].values())
    near, (_, layers, embeddings, both) = chapter["at_near"], chapter["cost"]
    assert near[0] > 0.7 and near[0] - near[3] < 0.06 < min(embeddings, both)
    assert layers < embeddings / 3


def test_tied_embeddings_bring_backward_to_the_bottom(chapter):
    head_only = chapter["head_only"]
    assert head_only(tied=True) == [True, True]
    assert head_only(tied=False) == [False, False]


def test_zeros_move_a_weight_frozen_late_and_only_eval_ends_the_drift(chapter):
    CHAPTER.run("late-freeze-run", chapter)
    assert chapter["filled"] > 0.05 and chapter["dropped"] == 0
    assert min(chapter["awake"]) > 0.1 and chapter["asleep"] == (0, 0)


def test_the_trainer_holds_what_is_not_frozen(chapter):
    CHAPTER.run("trainer-train", chapter)
    trained = [p.numel() for p in chapter["model"].parameters() if p.requires_grad]
    assert chapter["given"] == sum(trained) < chapter["model"].num_parameters()


def test_what_is_frozen_in_16_bits_and_its_border(chapter):
    CHAPTER.run("half-freeze", chapter)
    model = models.build(small_config("bert-large-tiny", num_hidden_layers=3))
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.tensor([0, 1])}
    whole = model(**batch).loss
    base = model.base_model.requires_grad_(False)
    chapter["halve_frozen"](base, 2, torch.bfloat16)
    assert base.embeddings.word_embeddings.weight.dtype == torch.bfloat16
    dtypes = [next(layer.parameters()).dtype for layer in base.encoder.layer]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    loss = model(**batch).loss
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(whole.item(), abs=0.02)


def test_features_computed_once_give_the_loss_of_the_whole_model(chapter):
    CHAPTER.run("cache cache-run", chapter)
    whole = chapter["anew"]
    cached = chapter["head_loss"](slice(None))
    torch.testing.assert_close(cached, whole, rtol=1e-4, atol=1e-5)
    head = chapter["model"].classifier.weight
    ours, theirs = (torch.autograd.grad(loss, head)[0] for loss in (cached, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number, before, wrong", [(1, "", 375.3), (2, "", 0.75), (3, "buggy", 16)])
def test_solutions_pass_their_check_and_wrong_answers_are_told_so(
    chapter, capsys, number, before, wrong
):
    CHAPTER.run(before, chapter)
    CHAPTER.check_exercise(number, wrong, chapter, capsys)
