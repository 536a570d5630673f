"""torchtitan's Llama 3.1 8B under FSDP2: bf16, 2 x 8,192 tokens per rank, on 8 and 128 H100s.

pytorch/torchtitan (BSD-3-Clause), benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, the
rows "FSDP": the peak of reserved memory that its log prints. The loop below says in plain PyTorch
what torchtitan's of that time (commit 9dec370) does, with transformers' Llama as the model.

Assumptions, made before any prediction was compared, all but the last, and unchanged since:

- **Sequences of 8,192 tokens** and AdamW of several tensors at a time, as llama3_8b.toml has them.
- **Selective checkpointing is that of operators**: of each layer the attention's result and every
  second matrix product are kept, the rest is computed again.
- **Every layer is gathered by itself** in bf16, its gradients are summed in fp32, and the last
  layer stays gathered for the backward pass.
- **The loss is one cross-entropy of fp32 logits**; the logits themselves are dropped before the
  backward pass.
- **The peak is that of a later step.** The cards had 96 GB, so the simulation has no limit.
- **The allocator is PyTorch's default one.** That torchtitan's launcher of that commit,
  run_llama_train.sh, sets `expandable_segments:True` was seen only after the comparison; this
  loop does not. With that setting it reserves 79.4 GiB where 82.4 were published, so a reserved
  figure that agrees does so partly by chance, and the runs confirm no more than that what is
  allocated stays below it.
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
KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def footprint_of(run: Record, card: GPU) -> Footprint:
    """The second of two steps, on the first of `run.recipe["ranks"]` ranks."""
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
        again = i < len(layers) - 1
        fully_shard(layers[i], mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mp_policy=policy)


def selective():
    """Contexts that keep attention's result and every second matrix product of a layer."""
    products = {
        True: itertools.count(),
        False: itertools.count(),
    }  # by whether it is the second run

    def policy(ctx, func, *args, **kwargs):
        kept = func in KEPT or (func is MM and next(products[ctx.is_recompute]) % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
