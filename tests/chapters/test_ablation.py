"""Chapter 15: its step in backward is the plain step, and holds no gradients."""

import pytest
import torch
from notebook import Notebook

from memlab import Recipe, models, simulate
from memlab.book import small_config
from memlab.book.chapters import ablation_runs

CHAPTER = Notebook("15-ablation")


@pytest.fixture(scope="module")
def chapter():
    own = CHAPTER.run("imports in-backward fused-step makers")
    return own | {"student": ablation_runs.reader("cpu", own["RATE"])}


def small_model(chapter):
    return models.build(chapter["student"].config, seed=3)


def test_a_step_in_backward_is_the_plain_step(chapter):
    ours, plain = small_model(chapter), small_model(chapter)
    rows = chapter["student"].seen[:4]
    chapter["step_in_backward"](ours, lambda w: torch.optim.SGD(w, 0.5))
    sgd = torch.optim.SGD(plain.parameters(), 0.5)
    for _ in range(3):
        loss = ours(input_ids=rows, labels=rows).loss
        (loss * 2.0**10).backward()
        plain(input_ids=rows, labels=rows).loss.backward()
        sgd.step()
        sgd.zero_grad()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert a.grad is None


def test_a_step_in_backward_holds_no_gradients(chapter, monkeypatch):
    few = small_config("bert-large", dropout=0.1, num_hidden_layers=2)
    build = models.build
    monkeypatch.setattr(models, "build", lambda name, **how: build(few, **how))
    make = chapter["MAKERS"]["8-bit Lion"]
    own = chapter["step_in_backward"], make, chapter["one_pass"]
    run = ablation_runs.bert_in_backward(*own)
    monkeypatch.undo()
    recipe = Recipe(few, batch_size=4, precision="fp16-amp", attention="sdpa")
    usual = simulate(recipe.but(checkpointing=True, optimizer="lion_8bit"), "V100")
    largest = 30522 * 1024 * 4
    gradients = max(usual.timeline.levels["gradients"])
    assert run.breakdown["gradients"] <= largest < gradients
    assert run.peak_allocated < usual.peak_allocated - usual.breakdown["gradients"] / 2
