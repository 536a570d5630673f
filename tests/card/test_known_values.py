"""What is known of values on the card, what stands for the others, and shapes that follow."""

import pytest
import torch

from memlab import models


def test_integers_keep_their_values_through_what_is_done_to_them(gpu):
    ids = torch.tensor([[5, 7, 0, 0], [3, 9, 4, 0]]).cuda()
    mask = ids != 0
    assert mask.sum(1).tolist() == [2, 3]
    assert ids[mask].tolist() == [5, 7, 3, 9, 4]
    assert mask.nonzero().shape == (5, 2)
    labels = ids.masked_fill(~mask, -100)
    labels[:, 0] = -100
    assert (labels != -100).sum().item() == 3
    assert torch.bincount(ids.flatten()).shape == (10,)
    assert ids.unique().tolist() == [0, 3, 4, 5, 7, 9]
    assert torch.arange(4, device="cuda").repeat_interleave(mask.sum(0)).shape == (5,)
    starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    assert starts.tolist() == [0, 2, 5]
    assert torch.zeros(2, 16, device="cuda")[:, : mask.sum(1).max()].shape == (2, 3)
    assert gpu.footprint.assumptions == ()


def test_a_single_number_keeps_its_value_until_an_unknown_one_is_written_into_it(gpu):
    """As audio codecs reckon the frames that they pad to, and loops keep the best loss."""
    stride = torch.tensor(4).cuda()
    frames = ((10 - 3) / stride + 1).ceil()
    assert frames.item() == 3 and torch.zeros(8, device="cuda")[: frames.long()].shape == (3,)
    loss, best = torch.randn(8, device="cuda").mean(), torch.tensor(float("inf"), device="cuda")
    assert loss < best
    before = torch.get_rng_state()
    torch.rand_like(best), best.bernoulli_(0.5)
    assert torch.get_rng_state().equal(before)
    total = torch.zeros(1).cuda()
    total += 2
    assert total.item() == 2
    total += loss
    assert total.item() == 1


def test_what_is_written_over_by_unknown_values_is_known_no_more(gpu):
    ids = torch.arange(8).cuda()
    view = ids[2:]
    view += 1
    assert ids.tolist() == [0, 1, 3, 4, 5, 6, 7, 8]
    ids[:2] = torch.randn(2, device="cuda").long()
    assert ids.nonzero().shape == (8, 1)  # the largest
    assert len(gpu.footprint.assumptions) == 1


def test_one_known_side_decides_a_condition(gpu):
    unknown = torch.randn(3, device="cuda") > 0.5
    assert (torch.ones(3, dtype=torch.bool).cuda() | unknown).tolist() == [True] * 3
    assert (torch.zeros(3, dtype=torch.long).cuda() & unknown).tolist() == [0] * 3


def test_generating_ends_at_the_length_that_was_asked_for(t4):
    model = models.build("gpt2-tiny").cuda().eval()
    tokens = torch.ones(2, 4, dtype=torch.long, device="cuda")
    mask = torch.ones_like(tokens)
    settings = dict(max_new_tokens=5, pad_token_id=0, eos_token_id=2)
    for how in (
        dict(do_sample=False),
        dict(do_sample=True, top_k=5, top_p=0.9),
        dict(num_beams=3),
        dict(num_beams=3, early_stopping=True),
    ):
        made = model.generate(tokens, attention_mask=mask, **settings, **how)
        assert made.shape == (2, 9)


def test_a_condition_that_is_written_into_reads_as_it_would_anew(gpu):
    """As a loop that generates notes which texts have ended: none ends before its length."""
    drawn = torch.randn(2, 8, device="cuda").argmax(-1)
    ended = torch.zeros(2, dtype=torch.bool, device="cuda")
    ended |= drawn == 50256
    assert not ended.all() and not ended.any()
    ended[0] = drawn[0] == 50256
    assert ended.tolist() == [False, False]
    ended.copy_(drawn != 50256)
    assert ended.all()


def test_a_mixtures_tokens_are_spread_evenly(gpu):
    chosen = torch.randn(12, 4, device="cuda").topk(2).indices
    assert torch.bincount(chosen.flatten(), minlength=4).tolist() == [6, 6, 6, 6]
    for expert in range(4):
        rows, places = torch.where(chosen == expert)
        assert rows.shape == places.shape == (6,)
    assert gpu.footprint.assumptions == ("top-k of values that are not known: chosen evenly",)


def test_guards_stay_quiet(gpu):
    """Those against numbers that are not finite are in test_waiting.py."""
    x = torch.randn(4, 8, device="cuda")
    assert not x.mean() > 1e4
    assert not (x.argmax(-1) >= 50_000).any()
    assert (torch.isnan(x) == False).all()  # noqa: E712


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.distributions.Categorical(probs=x.softmax(-1)),
        lambda x: torch.distributions.Categorical(logits=x),
        lambda x: torch.distributions.Normal(x, x.exp()),
    ],
)
def test_distributions_take_values_that_are_not_known(gpu, make, monkeypatch):
    # Some libraries turn the checks off for all.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    chosen = make(torch.randn(4, 8, device="cuda"))
    sample = chosen.sample()
    assert chosen.log_prob(sample).sum().item() == 1
    # Of the host's numbers.
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        torch.distributions.Normal(torch.zeros(2), -torch.ones(2))
