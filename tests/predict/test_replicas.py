"""Ranks of DistributedDataParallel from one card's trace: the bytes of a run of all layers."""

import pytest

from memlab.card.step_time import step_time
from memlab.evidence.grid import recipe_of
from memlab.gpus import find_gpu
from memlab.predict.replicas import peak_allocated_of, replica
from memlab.predict.simulate import serve, sized_log
from memlab.predict.trace_recorder import run_log
from memlab.trace.log import peak_allocated

CARD = find_gpu("A100-80GB")


def ddp(model, words):
    return recipe_of(f"{model} 2x128 sdpa accumulation=2 ranks=4 max_grad_norm=1.0 {words}")


RECIPES = [
    ddp("gpt2-tiny", "bf16-amp adamw_torch_fused"),
    ddp("gpt2-tiny", "bf16 checkpointing accumulation=1"),
    ddp("bert-large-tiny", "fp32 freeze=embeddings"),
    ddp("llama-3-8b-tiny", "bf16-amp adamw_8bit lora_rank=8 half"),
    ddp("llama-3-8b-tiny", "bf16 lora_rank=8"),
    ddp("llama-3-8b-tiny", "bf16 lora_rank=8 lora_half"),
    ddp("qwen3-0.6b-tiny", "bf16-amp checkpointing lora_rank=8 nf4"),
    ddp("distilbert", "bf16-amp adafactor"),
    pytest.param(ddp("bert-large", "bf16"), marks=pytest.mark.slow),
    pytest.param(ddp("qwen3-0.6b", "bf16-amp lora_rank=8 half"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_replica_holds_what_a_run_of_it_holds(recipe, monkeypatch):
    monkeypatch.setattr("memlab.predict.recipe_log.MAX_LAYERS_TO_RUN", 1)  # two are deep
    alone, run = sized_log(recipe.but(ranks=1), CARD), run_log(recipe, CARD)
    logs = replica(alone, recipe), run
    one, other = (serve(recipe, log, CARD) for log in logs)
    seconds = [step_time(log.work, CARD).expected for log in logs]
    rel = 0.04 if recipe.model_name.endswith("-tiny") else 0.01  # a block is much of a small one
    assert one.peak_reserved == pytest.approx(other.peak_reserved, rel=rel)
    assert one.peak_allocated == pytest.approx(other.peak_allocated, rel=rel)
    assert seconds[0] == pytest.approx(seconds[1], rel=rel)
    tensors = peak_allocated(run.events())  # without what blocks are larger
    assert peak_allocated_of(recipe, CARD) == pytest.approx(tensors, rel=rel)
