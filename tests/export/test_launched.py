"""The same loop in one process and in several, whoever starts them."""

import pytest

from memlab.export.launchers import RanksFailed, run_ranks

LOOP = """
import json, os
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

def steps(split=lambda net: None, rank=0, ranks=1):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    split(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).chunk(ranks)[rank]
    losses = []
    for _ in range(4):
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net
"""
SHARDED = """
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (ranks,))
losses, net = steps(lambda net: fully_shard(net, mesh=mesh), rank, ranks)
held = sum(weight.to_local().numel() for weight in net.parameters())
print(json.dumps({"rank": rank, "losses": losses, "held": held}))
dist.destroy_process_group()
"""
PREPARED = """
from accelerate import Accelerator
from memlab.workloads.sharding import check_split
net = Accelerator().prepare(steps()[1])
check_split(net, int(os.environ["WORLD_SIZE"]))
"""
ACCELERATE = ("accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2", "--num_machines=1")
ACCELERATE += ("--num_processes=2", "--main_process_port=0", "--mixed_precision=no")
ACCELERATE += ("--dynamo_backend=no", "--num_cpu_threads_per_process=1")


@pytest.fixture
def script(tmp_path):
    def write(*parts):
        path = tmp_path / "rank.py"
        path.write_text("".join(parts))
        return path

    return write


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "launcher"), [(2, ACCELERATE), (4, ())])
def test_ranks_learn_what_one_process_learns(script, ranks, launcher):
    known = {}
    exec(LOOP, known)
    alone, net = known["steps"]()
    found = run_ranks(script(LOOP, SHARDED), ranks, launcher=launcher)
    assert alone[0] > alone[-1] and [one["rank"] for one in found] == list(range(ranks))
    each = zip(*(one["losses"] for one in found), strict=True)
    assert [sum(of) / ranks for of in each] == pytest.approx(alone, rel=1e-5)
    assert sum(one["held"] for one in found) == sum(weight.numel() for weight in net.parameters())


@pytest.mark.slow
def test_a_launch_that_splits_nothing_is_caught(script):
    """Accelerate's FSDP wants a GPU: without one each process trains the whole model alone."""
    with pytest.raises(RanksFailed, match="holds 4,192 of 4,192 weights.*is not split"):
        run_ranks(script(LOOP, PREPARED), 2, launcher=ACCELERATE)
