"""The command `memlab`: what it prints and how it fails."""

import json

import pytest

from memlab.cli import main

TINY = ["--model", "bert-large-tiny", "--seq-len", "32", "--batch-size", "2"]


def run(capsys, *arguments):
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as error:  # argparse
        status = error.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_simulate_as_json(capsys):
    options = [*TINY, "--accumulation", 2, "--precision", "fp32", "--optimizer", "adamw_torch"]
    options += ["--checkpointing", "--attention", "eager", "--padded"]
    status, out, _ = run(capsys, "simulate", *options, "--json")
    result = json.loads(out)
    assert status == 0
    assert sum(result["breakdown"].values()) == result["peak_allocated"] <= result["peak_reserved"]
    assert result["peak_phase"] in ("forward", "backward", "optimizer step")
    assert result["parameters"] == result["trainable_parameters"] > 0
    assert result["recipe"]["checkpointing"] == "non-reentrant"
    assert result["recipe"]["padded"] is True
    assert {"torch", "transformers"} <= set(result["versions"])


def test_measure_as_json(capsys):
    status, out, _ = run(capsys, "measure", *TINY, "--device", "cpu", "--steps", 2, "--json")
    result = json.loads(out)
    assert status == 0
    assert sum(result["breakdown"].values()) == result["peak_allocated"]
    assert set(result["step_seconds"]) == {"median", "lower_quartile", "upper_quartile"}
    assert result["samples_per_second"] > 0
    assert result["device"].startswith("CPU")
    assert result["peak_reserved"] is result["context"] is result["device_used"] is None


def test_text_is_in_mib(capsys):
    status, out, _ = run(capsys, "simulate", *TINY)
    assert status == 0
    assert "peak allocated" in out and "MiB" in out


@pytest.mark.parametrize(
    "bad",
    [
        ["--model", "bert-huge"],
        ["--batch-size", "0"],
        ["--batch-size", "many"],
        ["--seq-len", "-5"],
        ["--seq-len", "100000"],
        ["--optimizer", "adam9"],
        ["--precision", "fp12"],
        ["--checkpointing", "often"],
        ["--attention", "linear"],
        ["--task", "translation"],
        ["--gpu", "T5"],
        ["--gpu", "0"],
        ["--gpu", "T4", "--precision", "bf16-amp"],
        ["--depth", "3"],
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, bad):
    status, out, err = run(capsys, "simulate", *TINY, *bad)
    assert (status, out) == (2, "")
    assert err.startswith("memlab: ") and err.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no-such-family"}', "{}"])
def test_a_broken_config_is_one_line_and_status_2(capsys, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    status, _, err = run(capsys, "simulate", "--model", tmp_path / "config.json")
    assert status == 2
    assert "config.json" in err and err.count("\n") == 1


def test_a_device_that_is_not_here(capsys):
    status, _, err = run(capsys, "measure", *TINY, "--device", "tpu")
    assert status == 2
    assert "'tpu'" in err and "cpu" in err


def test_out_of_memory_is_status_3(capsys):
    status, out, err = run(capsys, "simulate", *TINY, "--gpu", 30 * 2**20)
    assert (status, out) == (3, "")
    assert "CUDA out of memory. Tried to allocate" in err
