"""What chapters need around their loops does what it says, and refuses what it cannot do."""

import pytest
import torch
from transformers import Trainer

from memlab import Recipe, Training, models
from memlab.book import (
    QUIET,
    in_turns,
    shuffled_blocks,
    small_config,
    three_steps,
    train_on,
    train_step,
    trainer_losses,
)

TINY = Recipe("bert-large-tiny", batch_size=2, seq_len=16)


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-large-tiny", "llama-3-8b-tiny"])
def test_a_small_config_has_its_sizes_and_the_dropout_that_it_is_given(name):
    ids = torch.arange(8)[None]
    for dropout in (0.0, 0.3):
        model = models.build(small_config(name, dropout, vocab_size=600)).train()
        assert model.config.vocab_size == 600
        same = torch.equal(model(ids).logits, model(ids).logits)
        assert same == (dropout == 0 or name == "llama-3-8b-tiny")  # which has none but attention's


def test_a_size_that_the_config_does_not_have_is_refused():
    with pytest.raises(ValueError, match="^layers is not a size of gpt2-tiny: allowed are fields"):
        small_config("gpt2-tiny", layers=1)


def test_blocks_are_text_in_a_random_order_that_is_always_the_same():
    tokenizer, ids = shuffled_blocks(64)
    after = torch.rand(1)
    torch.rand(5)
    again = shuffled_blocks(64)[1]
    assert torch.equal(ids, again) and torch.equal(after, torch.rand(1))
    assert ids.shape[1] == 64 and ids.dtype == torch.int64 and len(tokenizer) == 512
    assert "the" in tokenizer.decode(ids[:8].flatten())


def test_train_on_takes_a_step_for_each_batch_and_moves_the_rate():
    model = models.build(small_config("gpt2-tiny", n_layer=1, n_embd=32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(64).view(4, 16)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = train_on(model, optimizer, [ids, {"input_ids": ids, "labels": ids}, ids], rates)
    assert losses[0] > losses[1] > losses[2]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)
    assert train_on(model, optimizer, []) == []
    assert all(p.grad is None for p in model.parameters())


def test_three_steps_are_the_recipes_and_another_loop_takes_their_place():
    one, two, three = (Training(TINY) for _ in range(3))
    losses, footprint = three_steps(one)
    torch.manual_seed(1)
    assert losses == [two.step() for _ in range(3)]
    assert footprint.breakdown["optimizer_states"] > 0
    shown = three.model, three.optimizer, three.batches[0]
    assert three_steps(three, lambda: train_step(*shown))[0] == losses


def test_a_trainers_losses_are_those_that_it_logs(tmp_path, capsys):
    ids = torch.arange(16).tolist()
    rows = [{"input_ids": ids, "labels": ids}] * 8
    recipe = Recipe("gpt2-tiny", batch_size=4)
    arguments = recipe.training_arguments(tmp_path, max_steps=2, logging_steps=1, **QUIET)
    model = models.build("gpt2-tiny")
    losses = trainer_losses(Trainer(model, arguments, train_dataset=rows))
    assert len(losses) == 2 and losses[0] > losses[1] > 0
    assert capsys.readouterr().out == "" and not list(tmp_path.glob("checkpoint*"))


def test_runs_in_turns_meet_the_same_moments():
    seen = []
    runs = {name: lambda name=name: seen.append(name) for name in "ab"}
    assert in_turns(runs, rounds=3).shape == (3, 2) and seen == list("ababab")
