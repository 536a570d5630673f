"""A rank of a small training by DeepSpeed, on the CPU: what it learns and what it holds."""

import os

import torch
import torch.distributed as dist

from memlab import Meter

WIDE, LAYERS, SEQUENCES = 64, 4, 4
WEIGHTS = LAYERS * WIDE * WIDE
# Its default for both is 500 million numbers, 2 GB in fp32, whatever the model's size.
BUCKETS = {"reduce_bucket_size": WIDE * WIDE, "allgather_bucket_size": WIDE * WIDE}


def net_and_inputs():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers), torch.randn(SEQUENCES, WIDE)


def zero(stage):
    """(losses of three steps, timeline of the third, weights between steps) on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update(
        {name: str(value) for name, value in said.items()} | {"DS_ACCELERATOR": "cpu"}
    )
    import deepspeed

    net, inputs = net_and_inputs()
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES // ranks,
        "zero_optimization": {"stage": stage, **BUCKETS},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, optimizer, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters()),
        dist_init_required=False,
        config=config,
    )
    inputs, losses = inputs.chunk(ranks)[rank], []

    def step():
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    step()
    step()
    with Meter("cpu", engine.module, optimizer.optimizer, [inputs]) as meter:
        step()
    held = sum(getattr(weight, "ds_tensor", weight).numel() for weight in net.parameters())
    return losses, meter.footprint.timeline, held


def zero_of_all_stages():
    return [zero(stage) for stage in (1, 2, 3)]
