"""The fake path without CUDA's rules, against real tensors."""

import pytest

from memlab import Meter
from memlab.evidence.grid import grid_runs, recipe_of
from memlab.predict.on_cpu import simulate_on_cpu
from memlab.workloads.training import Training

NOT_IN_THE_GRID = [  # the first and the fifth are in the sample
    "qwen2.5-0.5b-tiny 1x64 lora_rank=4 fp4 double_quant",
    "gpt2-tiny 1x64 reentrant fp16-amp",
    "gpt2-tiny 1x64 lora_rank=4 nf4 no_upcast bf16",
    "modernbert-base-tiny 2x64",  # its weights are drawn until all are within bounds
    "gpt2-tiny 1x64 lora_rank=4 half bf16-amp",
    "llama-3-8b-tiny 2x61 padded sdpa",
    "llama-3-8b-tiny 1x64 lora_rank=4 int8 checkpointing",
]


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    "recipe", [*map(recipe_of, NOT_IN_THE_GRID), *list(grid_runs(tiny=True).values())[::2]], ids=str
)
def test_a_real_step_on_a_cpu_takes_what_fake_tensors_say(recipe):
    training = Training(recipe)
    training.step()
    with Meter("cpu", training.model, training.optimizer, training.inputs) as meter:
        training.step()
    real, said = meter.footprint, simulate_on_cpu(recipe)
    # 1,024 bytes are a code table of bitsandbytes.
    assert said.peak_tensors == pytest.approx(real.peak_tensors, rel=1e-5, abs=1024)
    assert said.peak_phase == real.peak_phase
    for category, nbytes in real.breakdown.items():
        assert said.breakdown[category] == pytest.approx(nbytes, rel=1e-3, abs=2048), category
