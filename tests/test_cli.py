"""The command `memlab`: what it prints and how it fails."""

import json

import pytest

from memlab import models
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


def test_a_card_by_its_number_and_by_bytes(capsys):
    status, out, _ = run(capsys, "simulate", *TINY, "--gpu", "4090", "--json")
    assert (status, json.loads(out)["gpu"]) == (0, "4090")
    status, out, _ = run(capsys, "simulate", *TINY, "--gpu", 2**30, "--json")
    assert (status, json.loads(out)["gpu"]) == (0, 2**30)


def test_a_quantized_base_and_a_config_file(capsys, tmp_path):
    models.config("llama-3-8b-tiny").save_pretrained(tmp_path)
    options = ["--config", tmp_path / "config.json", "--seq-len", 16, "--lora-rank", 2]
    options += ["--base", "nf4", "--double-quant", "--no-upcast", "--json"]
    status, out, _ = run(capsys, "simulate", *options)
    assert status == 0
    result = json.loads(out)
    recipe = result["recipe"]
    assert (recipe["base"], recipe["double_quant"], recipe["upcast"]) == ("nf4", True, False)
    assert sum(result["breakdown"].values()) == result["peak_allocated"]


def test_record_lists_and_selects(capsys):
    status, out, _ = run(capsys, "record", "--device", "cpu", "--list", "--only", "bert-large sgd")
    assert (status, out) == (0, "bert-large 4x512 sgd\n")
    status, out, _ = run(capsys, "record", "--device", "cpu", "--list", "--json")
    runs = json.loads(out)["runs"]
    assert status == 0 and len(runs) >= 60
    assert all(recipe["model"].endswith("-tiny") for recipe in runs.values())


@pytest.mark.slow
def test_record_and_go_on(capsys, tmp_path):
    options = ["--device", "cpu", "--out", tmp_path, "--only", "bert-large sgd", "--steps", 1]
    status, out, _ = run(capsys, "record", *options, "--json")
    report = json.loads(out)
    assert (status, report["done"]) == (0, ["bert-large 4x512 sgd"])
    assert report["path"].startswith(str(tmp_path))
    status, out, _ = run(capsys, "record", *options)
    assert status == 0 and "0 run in" in out and "1 kept" in out


@pytest.mark.parametrize(
    "bad",
    [
        ["--only", "bert-huge"],
        ["--limit-minutes", "0"],
        ["--run-minutes", "soon"],
        ["--steps", "0"],
        ["--device", "tpu"],
    ],
)
def test_bad_input_of_record(capsys, tmp_path, bad):
    status, out, err = run(capsys, "record", "--device", "cpu", "--out", tmp_path, *bad)
    assert (status, out) == (2, "")
    assert err.startswith("memlab: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_record_is_one_line_and_status_2(capsys, tmp_path):
    path = tmp_path / "runs.json"
    path.write_text('{"schema": 1, "records": [{"kind"')
    status, out, err = run(capsys, "accuracy", path)
    assert (status, out) == (2, "")
    assert str(path) in err and err.count("\n") == 1
    assert run(capsys, "accuracy", tmp_path / "none.json")[0] == 2


def test_interrupted_recording_says_that_nothing_is_lost(capsys, tmp_path, monkeypatch):
    from memlab.evidence import worker

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker.Worker, "begin", interrupt)
    options = ["--device", "cpu", "--out", tmp_path, "--only", "bert-large sgd"]
    status, out, err = run(capsys, "record", *options)
    assert (status, out) == (130, "")
    assert "start again to go on" in err.splitlines()[-1]
