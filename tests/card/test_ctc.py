"""CTC loss, as Wav2Vec2, HuBERT and Parakeet are trained with it."""

import pytest
import torch
from torch.nn import functional as F

STEPS, BATCH, CLASSES, LONGEST = 50, 4, 32, 10


def lengths(kind):
    of_inputs, of_targets = [STEPS] * BATCH, [LONGEST, 8, 3, 9]
    if kind == "numbers":
        return tuple(of_inputs), tuple(of_targets)
    return torch.tensor(of_inputs, device=kind), torch.tensor(of_targets, device=kind)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["numbers", "cpu", "cuda"])
def test_it_holds_scores_by_time_and_place_in_the_longest_target(t4, kind, reduction):
    """cuda/LossCTC.cu: log_alpha, and beside it log_beta in the backward pass."""
    scores = torch.randn(STEPS, BATCH, CLASSES, device="cuda", requires_grad=True)
    targets = torch.randint(1, CLASSES, (BATCH, 2 * LONGEST), device="cuda")
    chances = scores.log_softmax(-1)
    given = lengths(kind)
    start = len(t4.tracer)
    loss = F.ctc_loss(chances, targets, *given, reduction=reduction)
    alpha = 4 * BATCH * STEPS * (2 * LONGEST + 1)
    made = [entry.change for entry in t4.tracer.entries[start:] if entry.change > 1000]
    assert made == [alpha]
    start = len(t4.tracer)
    loss.sum().backward()
    made = [entry.change for entry in t4.tracer.entries[start:] if entry.change > 1000]
    assert sorted(made) == sorted([scores.nbytes, alpha, scores.nbytes])
    assert scores.grad.shape == scores.shape
    assert t4.footprint.assumptions == ()


def test_lengths_that_are_not_known_are_the_longest_and_that_is_said(t4):
    chances = torch.randn(STEPS, BATCH, CLASSES, device="cuda").log_softmax(-1)
    targets = torch.randint(1, CLASSES, (BATCH, LONGEST), device="cuda")
    unknown = torch.rand(BATCH, device="cuda").long()
    F.ctc_loss(chances, targets, torch.full((BATCH,), STEPS), unknown)
    assert any("CTC" in said for said in t4.footprint.assumptions)
