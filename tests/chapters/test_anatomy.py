"""The anatomy chapter: what it shows is what memlab runs."""

from types import SimpleNamespace

import torch
from notebook import assert_steps_agree, cells_of

from memlab import Recipe, models
from memlab.workloads.training import Training

shown = cells_of("03-anatomy", "imports loop kept in-parts linear-cross-entropy")


def test_the_shown_loop_and_the_recipe_have_the_same_losses_and_peak(shown):
    recipe = Recipe(batch_size=2, optimizer="adamw_torch_loop").twin(seq_len=32)
    library = Training(recipe)
    model = models.build(recipe.model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    parts = SimpleNamespace(
        model=model, optimizer=adamw, inputs=library.inputs
    )  # of a loop that is not memlab's
    assert_steps_agree(parts, lambda: shown["train"](model, adamw, library.batches)[0], library)


def test_two_depths_give_what_any_depth_keeps(shown):
    recipe = Recipe("gpt2", batch_size=2, seq_len=64)
    assert shown["at_depth"](recipe, 6) == shown["kept"](recipe, 6)


def test_the_loss_in_parts_is_the_loss_with_the_same_gradient(shown):
    results = []
    for name, rows in {"whole": {}, "in_parts": {"rows": 10}, "in_one_call": {"rows": 10}}.items():
        torch.manual_seed(0)
        x = torch.randn(48, 16, requires_grad=True)
        head = torch.randn(100, 16, requires_grad=True)
        loss = shown[name](x, head, torch.arange(48), **rows)
        loss.backward()
        results.append((loss, x.grad, head.grad))
    whole, *others = results
    for parts in others:
        torch.testing.assert_close(parts, whole)
