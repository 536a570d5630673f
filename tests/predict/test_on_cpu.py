"""The fake path without CUDA's rules, against real tensors."""

import pytest

from memlab import Meter
from memlab.evidence.grid import grid_runs
from memlab.predict.on_cpu import simulate_on_cpu
from memlab.workloads.training import Training

SAMPLE = dict(list(grid_runs(tiny=True).items())[::2])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_real_step_on_a_cpu_takes_what_fake_tensors_say(name):
    training = Training(SAMPLE[name])
    training.step()
    with Meter("cpu", training.model, training.optimizer, training.inputs) as meter:
        training.step()
    said = simulate_on_cpu(SAMPLE[name]).peak_tensors
    assert said == pytest.approx(meter.footprint.peak_tensors, rel=0.001)
