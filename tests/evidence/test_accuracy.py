"""Predictions beside records: what is compared with what, and what the report says."""

import dataclasses

import pytest
from helpers import a_run

from memlab import Meter, Recipe, measure, simulate
from memlab.evidence import grid, worker
from memlab.evidence.accuracy import (
    Comparison,
    compare_records,
    family,
    simulate_on_cpu,
    technique,
)
from memlab.evidence.accuracy_text import report, summary
from memlab.evidence.records import find_records
from memlab.gpus import GPUS
from memlab.workloads.training import Training

MiB = 2**20
TINY = Recipe(model="gpt2-tiny", batch_size=2, seq_len=32)
SAMPLE = dict(list(grid.grid_runs(tiny=True).items())[::2])

SIMULATE = {"simulate": simulate}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_real_step_on_a_cpu_takes_what_fake_tensors_say(name):
    """The fake path without CUDA's rules, against real tensors, over the grid's twins."""
    training = Training(SAMPLE[name])
    training.step()
    with Meter("cpu", training.model, training.optimizer, training.inputs) as meter:
        training.step()
    said = simulate_on_cpu(SAMPLE[name]).peak_tensors
    assert said == pytest.approx(meter.footprint.peak_tensors, rel=0.001)


def test_a_recorded_gpu_run_is_compared_in_four_figures():
    truth = simulate(TINY, "T4")
    figures = {
        "peak_allocated_bytes": truth.peak_allocated,
        "peak_reserved_bytes": truth.peak_reserved * 2,
        "context_bytes": 7,
        "device_used_bytes": truth.device_used,
        "total_memory_bytes": GPUS["T4"].total_memory,
        "step_seconds": 1.0,
    }
    found = {one.figure: one for one in compare_records([a_run(figures)], SIMULATE)}
    assert set(found) == {"allocated", "reserved", "device used", "seconds"}
    assert found.pop("seconds").recorded == 1.0
    assert found["allocated"].error == 0.0 == found["device used"].error
    assert found["reserved"].error == -0.5
    assert [one.missed for one in found.values()] == [False, True, False]
    assert {one.against for one in found.values()} == {"Tesla T4"}


def test_a_published_run_brings_its_context():
    (run,) = [run for run in find_records("published") if run.name.endswith("fp16, adafactor")]
    used, context = (run.figures[f"{name}_bytes"] for name in ("device_used", "context"))
    said = dataclasses.replace(simulate(TINY, "V100"), peak_reserved=used - context)
    one, time = compare_records([run], {"said": lambda recipe, gpu: said})
    assert (one.against, one.figure) == ("published, Tesla V100-SXM2-16GB", "device used")
    assert one.predicted == one.recorded == used
    assert not one.missed
    assert time.figure == "seconds" and time.predicted == said.step_time.expected
    assert time.recorded == pytest.approx(4 / run.figures["samples_per_second"])
    assert time.bounds == (said.step_time.low, said.step_time.high)


def test_a_cpu_run_is_compared_with_the_cpus_own_kernels():
    here = measure(TINY, "cpu", steps=1)
    run = a_run(worker.figures_of(here), device=here.device)
    (one,) = compare_records([run])
    assert one.predictor == "simulate, CPU kernels" and one.figure == "tensors"
    assert one.error == pytest.approx(0, abs=0.001)


@pytest.mark.parametrize(
    ("figure", "old", "error", "missed"),
    [
        ("reserved", False, 0.04, False),
        ("reserved", False, -0.06, True),
        ("reserved", True, -0.14, False),
        ("reserved", True, 0.16, True),
        ("seconds", True, 0.3, False),
        ("seconds", False, 0.5, True),
    ],
)
def test_software_of_before_pytorch_2_is_allowed_more_bytes_and_no_more_seconds(
    figure, old, error, missed
):
    one = Comparison("T4", "a run", "decoder", "full", "simulate", figure, 1 + error, 1, old=old)
    assert one.missed is missed


def test_out_of_memory_is_a_verdict():
    ran_out, room = {"out_of_memory": True}, {"total_memory_bytes": 160 * MiB}
    figures = {"device_used_bytes": 2**30}
    right, false_fit, false_alarm = (
        compare_records([a_run(values)], SIMULATE)[0]
        for values in (ran_out | room, ran_out, figures | room)
    )
    for one, said, was in ((right, 1, 1), (false_fit, 0, 1), (false_alarm, 1, 0)):
        assert (one.figure, one.predicted, one.recorded) == ("out of memory", said, was)
        assert one.missed == (said != was)
    text = report([right, false_fit, false_alarm], [])
    assert "out of memory: 1 of 3 as recorded" in text
    assert "a fit was predicted, out of memory recorded" in text
    assert "out of memory was predicted, a fit recorded" in text


def test_what_is_not_predicted_is_refused_in_its_row():
    unknown = compare_records([a_run({"peak_reserved_bytes": 1}, device="Tesla K80")], SIMULATE)
    half = dataclasses.replace(a_run({"peak_reserved_bytes": 1}), recipe={"precision": "bf16"})
    (k80,), (t4,) = unknown, compare_records([half], SIMULATE)
    assert "Tesla K80 is none of the cards T4" in k80.refused and k80.missed
    assert "no native bfloat16" in t4.refused and t4.error is None
    (row, *_) = summary([k80])
    assert (row["runs"], row["refused"]) == (1, 1) and "median" not in row
    assert "refused: Tesla K80" in report([k80], [])


def test_the_formula_runs_out_where_the_simulation_does():
    recipe = {"model": "bert-large", "batch_size": 8, "seq_len": 512}
    run = dataclasses.replace(a_run({"out_of_memory": True}), recipe=recipe)
    found = {one.predictor: one for one in compare_records([run])}
    assert set(found) == {"simulate", "formula"}
    assert all(one.predicted is True and not one.missed for one in found.values())


@pytest.mark.parametrize(
    ("changes", "family_of", "technique_of"),
    [
        ({"model": "bert-base", "task": "masked-lm", "freeze": "embeddings"}, "encoder", "frozen"),
        ({"model": "llama-3-8b", "lora_rank": 8}, "decoder", "LoRA"),
        ({"model": "t5-3b"}, "encoder-decoder", "full"),
        ({"model": "mixtral-8x7b"}, "moe", "full"),
    ],
)
def test_family_and_technique(changes, family_of, technique_of):
    recipe = Recipe(**changes)
    assert (family(recipe), technique(recipe)) == (family_of, technique_of)


def test_a_base_is_right_anywhere_in_its_range():
    recipe = TINY.but(lora_rank=2, base="nf4")
    footprint = simulate(recipe, "T4")
    low, high = footprint.peak_reserved, footprint.peak_reserved + 100 * MiB
    footprint = dataclasses.replace(footprint, reserved_range=(low, high))

    def compared(name, nbytes):
        run = a_run({name: nbytes})
        run = dataclasses.replace(run, recipe=run.recipe | {"lora_rank": 2, "base": "nf4"})
        (one,) = compare_records([run], {"simulate": lambda *_: footprint})
        return one

    def reserved(nbytes):
        return compared("peak_reserved_bytes", nbytes)

    assert [reserved(n).missed for n in (low - 1, low, high, high + 1)] == [
        True,
        False,
        False,
        True,
    ]
    assert reserved(low).predicted == footprint.peak_reserved and reserved(low).inside
    assert compared("device_used_bytes", high).bounds == (
        low + GPUS["T4"].context,
        high + GPUS["T4"].context,
    )
    text = report([reserved(low), reserved(high + 1)], [])
    assert "inside the reported range: 1 of 2 figures" in text and " MiB to " in text
