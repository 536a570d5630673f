"""What chapters need around their loops does what it says, and refuses what it cannot do."""

from types import SimpleNamespace

import pytest
import torch
from notebook import assert_same_run, traced
from transformers import Trainer

from memlab import Recipe, Training, models
from memlab.book import (
    QUIET,
    estimated_run,
    in_turns,
    shuffled_blocks,
    small_config,
    three_steps,
    train_on,
    train_step,
    trainer_losses,
)
from memlab.footprint import StepTime

TINY = Recipe("bert-large-tiny", batch_size=2, seq_len=16)


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-large-tiny", "llama-3-8b-tiny"])
def test_a_small_config_has_its_sizes_and_no_dropout(name):
    model = models.build(small_config(name, vocab_size=600)).train()
    assert model.config.vocab_size == 600
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert models.config(name).vocab_size != 600  # the next one is as it was


def test_a_small_config_keeps_the_dropout_that_it_is_given():
    config = small_config("gpt2-tiny", dropout=0.3, n_layer=1)
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.3, 0.3, 0.3)
    assert config.n_layer == 1


def test_a_size_that_the_config_does_not_have_is_refused():
    with pytest.raises(ValueError, match="^layers is no size of gpt2-tiny: allowed are fields"):
        small_config("gpt2-tiny", layers=1)


def test_blocks_are_text_in_a_random_order_that_is_always_the_same():
    tokenizer, ids = shuffled_blocks(64)
    after = torch.rand(1)
    torch.rand(5)
    again = shuffled_blocks(64)[1]
    assert torch.equal(ids, again) and torch.equal(after, torch.rand(1))
    assert ids.shape[1] == 64 and ids.dtype == torch.int64 and len(tokenizer) == 512
    assert "the" in tokenizer.decode(ids[:8].flatten())


@pytest.fixture
def reader():
    """A small GPT-2 and its optimizer, the same every time."""
    model = models.build(small_config("gpt2-tiny", n_layer=1, n_embd=32))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_train_on_takes_a_step_for_each_batch_and_moves_the_rate(reader):
    model, optimizer = reader
    ids = torch.arange(64).view(4, 16)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = train_on(model, optimizer, [ids] * 3, rates)
    assert losses[0] > losses[1] > losses[2]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)
    again = models.build(model.config)
    sgd = torch.optim.SGD(again.parameters(), lr=0.1)
    batch = {"input_ids": ids, "labels": ids}
    assert train_step(again, sgd, batch) == losses[0]
    assert train_on(again, sgd, []) == []
    assert all(p.grad is None for p in again.parameters())


def test_train_on_takes_labels_of_their_own(reader):
    ids = torch.arange(16)[None]
    nothing = torch.full_like(ids, -100)
    (loss,) = train_on(*reader, [{"input_ids": ids, "labels": nothing}])
    assert loss != loss  # no token counts, so the mean is not a number


def test_three_steps_are_the_recipes_and_another_loop_takes_their_place():
    one, two, three = (Training(TINY) for _ in range(3))
    losses, footprint = three_steps(one)
    assert_same_run((losses, footprint), traced(two, two.step))
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
    seen, ticks = [], iter(range(100))
    runs = {name: (lambda name=name: seen.append(name)) for name in "ab"}
    frame = in_turns(runs, rounds=3, clock=lambda: next(ticks))
    assert seen == list("ababab")
    assert frame.shape == (3, 2) and list(frame) == ["a", "b"] and (frame.to_numpy() == 1).all()


@pytest.mark.parametrize("seconds, inside", [(20.0, True), (15.0, False), (33.0, False)])
def test_a_printed_time_is_set_beside_the_estimate_of_all_its_steps(seconds, inside):
    step = StepTime(low=1.6, expected=2.0, high=3.2, parts={}, flops=0, peak_rate=0, samples=4)
    figures = {"run_seconds": seconds, "samples_per_second": 40 / seconds}  # 10 steps of 4
    run = SimpleNamespace(figures=figures)
    said, agrees = estimated_run(run, SimpleNamespace(step_seconds=step))
    assert f"{seconds:.0f} s, not measured again, are estimated at 20 (16 to 32" in said
    assert agrees == inside
