"""torchtitan's Llama 3.1 8B under FSDP2: bf16, 2 x 8,192 tokens per rank, on 8 and 128 H100s.

Source: pytorch/torchtitan (BSD-3-Clause), benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and
3, rows "FSDP". They give the peak of reserved memory that its log prints. The loop below repeats
torchtitan's loop of that time (commit 9dec370) in plain PyTorch, with transformers' Llama.

Assumptions; all but the last were made before any prediction was compared and have not changed:

- **Sequences of 8,192 tokens** and multi-tensor AdamW, as in llama3_8b.toml.
- **Selective checkpointing works by operator**: each layer keeps the result of attention and every
  second matrix product, and recomputes the rest.
- **Every layer is gathered by itself** in bf16, its gradients are reduced in fp32, and the last
  layer stays gathered for the backward pass.
- **The loss is one cross-entropy of fp32 logits**; the logits themselves are freed before the
  backward pass.
- **The peak is that of a later step.** The GPUs had 96 GB, so the simulation has no limit.
- **The allocator has PyTorch's default settings.** torchtitan's launcher of that commit,
  run_llama_train.sh, sets `expandable_segments:True`. That was noticed only after the comparison,
  and this loop does not set it. With it the loop reserves 79.4 GiB, where 82.4 GiB were published.
  So a reserved figure that agrees does so partly by chance. The runs only confirm that allocated
  memory stays below the published reserved memory.
"""

import itertools

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memlab import models
from memlab.card.device import SimulatedGPU
from memlab.evidence.records import Record
from memlab.footprint import Footprint
from memlab.gpus import GPU
from memlab.spec.recipe import Recipe

MM = torch.ops.aten.mm.default
KEPT = {  # results of attention, which selective checkpointing keeps
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The footprint of the second of two steps, on the first of `run.recipe["ranks"]` ranks."""
    recipe = Recipe(**run.recipe)
    with SimulatedGPU(card.without_limit(), ranks=recipe.ranks) as gpu:
        with torch.device("meta"):
            model = models.build(recipe.model, recipe.task, torch.float32, recipe.attention)
        shard(model)
        model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        shape = recipe.batch_size, recipe.seq_len
        for _ in range(2):
            gpu.reset_peak()
            tokens, labels = (torch.randint(1000, shape, device="cuda") for _ in range(2))
            optimizer.zero_grad()
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            del logits
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return gpu.footprint


def shard(model: torch.nn.Module) -> None:
    """Checkpoint and shard the layers of a transformers decoder, in place."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, context_fn=selective, preserve_rng_state=False)
        again = i < len(layers) - 1  # the last layer's backward pass follows at once
        fully_shard(layers[i], mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mp_policy=policy)


def selective():
    """Contexts for `checkpoint` that keep attention's result and every second matrix product."""
    products = {
        True: itertools.count(),
        False: itertools.count(),
    }  # by whether it is the second run

    def policy(ctx, func, *args, **kwargs):
        kept = func in KEPT or (func is MM and next(products[ctx.is_recompute]) % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
