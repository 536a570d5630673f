"""The fake path without CUDA's rules, against real tensors."""

import pytest

from memlab import Meter, Recipe
from memlab.evidence.grid import grid_runs
from memlab.predict.on_cpu import simulate_on_cpu
from memlab.workloads.training import Training

LORA = {"seq_len": 64, "lora_rank": 4}
NOT_IN_THE_GRID = [  # the first and the fourth are in the sample
    Recipe("qwen2.5-0.5b-tiny", **LORA, base="fp4", double_quant=True),
    Recipe("gpt2-tiny", seq_len=64, checkpointing="reentrant", precision="fp16-amp"),
    Recipe("gpt2-tiny", **LORA, base="nf4", upcast=False, precision="bf16"),
    Recipe("gpt2-tiny", **LORA, base="half", precision="bf16-amp"),
    Recipe("llama-3-8b-tiny", batch_size=2, seq_len=61, padded=True, attention="sdpa"),
    Recipe("llama-3-8b-tiny", **LORA, base="int8", checkpointing=True),
]


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    "recipe", [*NOT_IN_THE_GRID, *list(grid_runs(tiny=True).values())[::2]], ids=str
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
