"""The process of one run: what it answers, and how it ends."""

import dataclasses

import pytest
from helpers import TINY

from memlab import measure
from memlab.evidence import worker
from memlab.units import MiB


@pytest.mark.slow
def test_a_process_that_breaks_says_its_last_line():
    order = {"device": "cpu", "recipe": {"model": "gpt2-tiny", "colour": "red"}}
    answer = worker.ask(order, 300)
    assert "colour" in answer["failed"] and "\n" not in answer["failed"]


def test_figures_of_a_gpu_keep_the_four_apart():
    result = measure(TINY, "cpu", steps=1)
    footprint = dataclasses.replace(
        result.footprint, peak_reserved=40 * MiB, context=100 * MiB, device_used=150 * MiB
    )
    figures = worker.figures_of(dataclasses.replace(result, footprint=footprint))
    assert figures["peak_allocated_bytes"] == footprint.peak_allocated
    assert figures["peak_reserved_bytes"] == 40 * MiB
    assert figures["device_used_bytes"] == 150 * MiB
    assert "peak_tensors_bytes" not in figures
    assert "peak_reserved_bytes" not in worker.figures_of(result)
