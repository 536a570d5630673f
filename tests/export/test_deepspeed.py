"""DeepSpeed's ZeRO 1 to 3, really run in two processes on the CPU: what each rank holds."""

import pytest
import torch
from deepspeed_rank import SEQUENCES, WEIGHTS, WIDE, net_and_inputs, zero_of_all_stages
from real_ranks import run_ranks

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install memlab[deepspeed]")
RANKS = 2


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """stage -> (losses, timeline, weights between steps) of each rank."""
    found = run_ranks(RANKS, zero_of_all_stages, folder=tmp_path_factory.mktemp("deepspeed"))
    return dict(enumerate(zip(*found, strict=True), 1))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_learn_what_one_process_learns(stages, stage):
    net, inputs = net_and_inputs()
    optimizer, alone = torch.optim.AdamW(net.parameters()), []
    for _ in range(3):
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
    losses = torch.tensor([losses for losses, *_ in stages[stage]])
    assert losses.mean(0).tolist() == pytest.approx(alone, rel=1e-5)
    assert alone[0] > alone[-1] and SEQUENCES % RANKS == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_splits_one_more(stages, stage):
    for _, timeline, held in stages[stage]:
        most = {name: max(level) for name, level in timeline.levels.items()}
        count = 4  # of the steps
        assert most["optimizer_states"] == 2 * 4 * WEIGHTS // RANKS + count
        assert held == (WEIGHTS // RANKS if stage == 3 else WEIGHTS)
        if stage == 1:
            assert most["gradients"] == 4 * WEIGHTS
        else:  # its part, and what waits in the bucket
            assert most["gradients"] <= 4 * (WEIGHTS // RANKS + 2 * WIDE * WIDE)
