"""Ranks of DistributedDataParallel from one card's trace: the bytes of a run of all layers."""

import pytest

from memlab import Recipe
from memlab.card.step_time import step_time
from memlab.gpus import find_gpu
from memlab.predict.replicas import peak_allocated_of, replica
from memlab.predict.simulate import serve, sized_log
from memlab.predict.trace_recorder import run_log
from memlab.trace.log import peak_allocated

CARD = find_gpu("A100-80GB")
DDP = dict(batch_size=2, accumulation=2, seq_len=128, ranks=4, attention="sdpa", max_grad_norm=1.0)
LORA = dict(lora_rank=8, base="half", precision="bf16-amp")
RECIPES = [
    Recipe("gpt2-tiny", precision="bf16-amp", optimizer="adamw_torch_fused", **DDP),
    Recipe("gpt2-tiny", precision="bf16", checkpointing=True, **DDP | {"accumulation": 1}),
    Recipe("bert-large-tiny", precision="fp32", freeze=("embeddings",), **DDP),
    Recipe("llama-3-8b-tiny", optimizer="adamw_8bit", **LORA, **DDP),
    Recipe("llama-3-8b-tiny", precision="bf16", lora_rank=8, **DDP),
    Recipe("llama-3-8b-tiny", precision="bf16", lora_rank=8, lora_fp32=False, **DDP),
    Recipe("qwen3-0.6b-tiny", checkpointing=True, **LORA | {"base": "nf4"}, **DDP),
    Recipe("distilbert", precision="bf16-amp", optimizer="adafactor", **DDP),
    pytest.param(Recipe("bert-large", precision="bf16", **DDP), marks=pytest.mark.slow),
    pytest.param(Recipe("qwen3-0.6b", **LORA, **DDP), marks=pytest.mark.slow),
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
