"""Other people's loops: the simulation still gives the predictions that are kept of their runs."""

import dataclasses

import pandas as pd
import pytest
import torch

from memlab import find_records, models
from memlab.evidence.records import load
from validation.accuracy import FILE, files, rows_of
from validation.loops import LOOPS, torchtune

KEPT = pd.read_csv(FILE).set_index(["file", "run", "figure"])["predicted"]
# Quick runs of each; PEFT's at its full depth, for the peak in the cache is one of order.
SMALL = "HuggingFaceTB/SmolLM2-135M {} 2x512 r32 2026-09-15"
SAMPLE = {
    "published-source-001.json": ["accumulation, checkpointing, fp16, adafactor"],
    "published-fitcheck-t4.json": [SMALL.format("fp16 eager"), SMALL.format("nf4 sdpa")],
    "published-preflight-t4.json": ["distilbert 8 x 256", "resnet50 16 x 224"],
    "published-peft-l40s.json": ["lora rank32-lorafa"],
    "published-torchtune-a100.json": ["+ Activation Checkpointing"],
    "published-torchtitan-h100.json": ["FSDP, 8 ranks"],
}
SLOW = list(SAMPLE)[3:]
# Reserved bytes shift with the order in which Python frees cycles of tensors.
NEAR = {"reserved": 5e-3, "device used": 5e-3, "seconds": 0.01}


@pytest.mark.parametrize(
    "file", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SAMPLE]
)
def test_the_simulation_says_what_is_kept(file):
    runs = {run.name: run for run in load(files()[file])}
    for name in SAMPLE[file]:
        rows = rows_of(file, runs[name])
        assert rows
        for row in rows:
            kept = KEPT[file, name, row["figure"]]
            near = NEAR.get(row["figure"], 1e-6)
            assert row["predicted"] == pytest.approx(kept, rel=near), (name, row["figure"])


def test_every_loop_has_runs_and_the_other_way_round():
    loops = {run.loop for path in files().values() for run in load(path)}
    assert loops == {"", *LOOPS}


def test_torchtunes_model_is_llama():
    config = models.config("llama-3.2-3b")
    with torch.device("meta"):
        numbers = sum(p.numel() for p in torchtune.Decoder(config, 0).parameters())
        adapters = torchtune.Decoder(config, 64).parameters()
        assert numbers == models.build(config).num_parameters()
        assert sum(p.numel() for p in adapters if p.requires_grad) < 0.05 * numbers


def test_a_loop_that_is_not_known_is_refused_in_its_row():
    unknown = dataclasses.replace(find_records(loop="fitcheck")[0], loop="nobody's")
    (why,) = {row["refused"] for row in rows_of("a file", unknown)}
    assert "nobody's" in why and "fitcheck" in why
