"""The command `memlab`: what it prints and how it fails."""

import errno
import json
import os
import subprocess
import sys

import pytest
from helpers import run_python

from memlab import models
from memlab.cli import main

TINY = ["--model", "bert-large-tiny", "--seq-len", "32", "--batch-size", "2"]
PLAN = ["plan", "--model", "gpt2-tiny", "--seq-len", 64, "--effective-batch", 4]
PLAN += ["--ways", "full", "--precisions", "fp16-amp"]
SERVE = ["serve", "--model", "gpt2-tiny", "--prompt", 40, "--new-tokens", 3, "--weights", "fp32"]


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
    assert result["peak_phase"] == "optimizer step"
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


def test_a_report_has_what_an_issue_needs_and_no_path(capsys, tmp_path):
    folder = tmp_path / "secret" / "my-model"
    models.config("gpt2-tiny").save_pretrained(folder)
    status, out, _ = run(capsys, "report", "--model", folder, "--seq-len", 32, "--gpu", "T4")
    rows = dict(line.removeprefix("- ").split(": ", 1) for line in out.splitlines())
    assert status == 0 and "secret" not in out
    assert list(rows) == [
        "versions", "device", "card asked for", "recipe", "predicted", "what happened"
    ]  # fmt: skip
    assert "torch " in rows["versions"] and rows["card asked for"] == "T4"
    assert "my-model" in rows["recipe"] and "seq_len 32" in rows["recipe"]
    assert "MiB allocated" in rows["predicted"]
    status, out, _ = run(capsys, "report", "--model", "gpt2-xl", "--batch-size", 99, "--gpu", "T4")
    assert status == 0 and "out of memory" in out


RECORD = ["record", "--device", "cpu", "--out", "."]
BAD = [
    *(["simulate", *TINY, *more] for more in (
        ["--batch-size", "many"],
        ["--optimizer", "adam9"],
        ["--checkpointing", "often"],
        ["--gpu", "T5"],
        ["--depth", "3"],
        ["--rank", "8"],
    )),
    *([*PLAN, "--gpu", *more] for more in (
        ["T5"],
        ["T4", "--margin", "5"],
        ["T4", "--script", "no/such/folder/train.py"],
        ["T4", "--effective-batch", "1e20"],
        ["T4", "--script", "train.py", "--api", "lightning"],
    )),
    *([*SERVE, *more] for more in (
        ["--prompt", 0],
        ["--largest", "seq-len"],
    )),
    [*RECORD, "--only", "bert-huge"],
    [*RECORD, "--run-minutes", "soon"],
    [*RECORD, "--steps", "0"],
    ["measure", *TINY, "--device", "tpu"],
    ["record", "--check", "none.json"],
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda words: " ".join(map(str, words)))
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, bad):
    monkeypatch.chdir(tmp_path)  # where records would go
    status, out, err = run(capsys, *bad)
    assert (status, out) == (2, "")
    assert err.startswith("memlab: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_number_may_have_commas_and_else_is_told_what_is_allowed(capsys):
    long = ["--model", "gpt2-tiny", "--batch-size", 1]
    status, out, _ = run(capsys, "simulate", *long, "--seq-len", "1,024", "--json")
    assert (status, json.loads(out)["recipe"]["seq_len"]) == (0, 1024)
    for wrong in ("4k", "1,02", "1e3"):
        _, _, err = run(capsys, "simulate", *long, "--seq-len", wrong)
        assert f"invalid value {wrong!r}: allowed are whole numbers, such as 4096 or 4,096" in err


def test_an_error_without_words_is_one_line(capsys, monkeypatch):
    def wordless(options):
        raise OSError

    monkeypatch.setattr("memlab.cli.simulate.run", wordless)
    assert run(capsys, "simulate", *TINY) == (2, "", "memlab: OSError\n")


def test_an_interrupted_command_says_so_in_a_whole_sentence(capsys, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("memlab.cli.simulate.run", interrupt)
    status, _, err = run(capsys, "simulate", *TINY)
    assert (status, err) == (130, "memlab: interrupted; nothing was written\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_standard_output_is_one_line():
    code = "import sys; from memlab.cli import main, simulate; "
    code += "simulate.run = lambda options: {'text': 'fits'}; "
    code += "sys.exit(main(['simulate', '--model', 'gpt2']))"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "memlab: the answer could not be written: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_snapshot_without_room_does_not_cost_the_answer(capsys, tmp_path):
    (tmp_path / "train.py").write_text("print('nothing is trained')")
    status, out, err = run(capsys, "run", tmp_path / "train.py", "--snapshot", "/dev/full")
    assert status == 1 and "peak allocated" in out
    assert err.endswith("/dev/full was not written: No space left on device\n")


def test_a_plan_as_text_and_as_json(capsys):
    status, out, err = run(capsys, *PLAN, "--gpu", "T4")
    assert status == 0 and out.startswith("gpt2-tiny on T4: full fine-tuning fits, ")
    assert "Chance that tier 1 does not fit: below 1% (0 of " in out
    status, out, _ = run(capsys, *PLAN, "--gpu", "T4", "--json")
    values = json.loads(out)
    assert status == 0 and values["fits"] and values["gpu"] == "T4" and values["script"] is None
    assert values["fastest"]["recipe"]["seq_len"] == 64


def test_a_plan_for_several_cards(capsys):
    status, out, _ = run(capsys, *PLAN, "--gpu", "1 GiB", "T4", "--json")
    assert (status, json.loads(out)["smallest"]) == (0, {"full": "1,024 MiB"})


def test_a_script_is_never_written_over_a_file_unasked(capsys, tmp_path):
    path = tmp_path / "train.py"
    models.config("gpt2-tiny").save_pretrained(tmp_path)
    options = ["--model", tmp_path, "--gpu", "T4", "--script", path]
    status, out, _ = run(capsys, *PLAN, *options)
    assert status == 0 and "pip install" in out
    written = path.read_text()
    compile(written, "train.py", "exec")
    path.write_text("mine")
    status, out, err = run(capsys, *PLAN, *options)
    assert (status, out, path.read_text()) == (2, "", "mine")
    assert "--force" in err and err.count("\n") == 1
    assert run(capsys, *PLAN, *options, "--force", "--json")[0] == 0
    assert path.read_text() == written


def test_a_script_that_cannot_be_written_does_not_cost_the_plan(capsys, tmp_path, monkeypatch):
    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("memlab.cli.plan.write_whole", no_room)
    models.config("gpt2-tiny").save_pretrained(tmp_path)
    monkeypatch.setattr("memlab.export.training_script.training_script", lambda *_: "")
    path = tmp_path / "train.py"
    status, out, _ = run(capsys, *PLAN, "--gpu", "T4", "--script", path)
    assert status == 2 and out.startswith("gpt2-tiny on T4: full fine-tuning fits, ")
    assert out.endswith(f"{path} was not written: No space left on device\n")


@pytest.mark.slow
def test_a_script_needs_one_card_and_a_plan_which_has_status_3_where_nothing_fits(capsys, tmp_path):
    path = tmp_path / "train.py"
    assert run(capsys, *PLAN, "--script", path)[0] == 2
    status, out, _ = run(capsys, *PLAN, "--gpu", 10 * 2**20, "--script", path)
    assert status == 3 and "nothing fits" in out and "What would fit:" in out
    assert not path.exists()


@pytest.mark.parametrize("asked, of", [(["simulate", *TINY], "recipe"), (SERVE, "serving")])
def test_the_largest_that_fits(capsys, asked, of):
    options = *asked, "--largest", "batch-size"
    status, out, _ = run(capsys, *options, "--gpu", 100 * 2**20, "--json")
    found = json.loads(out)
    assert status == 0 and found[of]["batch_size"] == found["largest"]["value"] > 1
    status, out, _ = run(capsys, *options, "--gpu", 10 * 2**20)
    assert status == 3 and "not even batch_size=1" in out
    assert run(capsys, *options)[0] == 2


def test_out_of_memory_is_status_3(capsys):
    status, out, err = run(capsys, "simulate", *TINY, "--gpu", 30 * 2**20)
    first, second = out.splitlines()
    assert status == 3 and "does not fit, " in first and first.endswith(" more than its 30.0 MiB")
    assert "capability 8.0, without a CUDA context" in first and second.startswith("Recipe(")
    assert "CUDA out of memory. Tried to allocate" in err


def test_a_card_by_its_number_and_by_bytes(capsys):
    status, out, _ = run(capsys, "simulate", *TINY, "--gpu", "4090", "--json")
    assert (status, json.loads(out)["gpu"]) == (0, "4090")
    status, out, _ = run(capsys, "simulate", *TINY, "--gpu", 2**30, "--json")
    assert (status, json.loads(out)["gpu"]) == (0, 2**30)
    status, out, err = run(capsys, "simulate", *TINY, "--gpu", 16)
    assert status == 0 and err == "memlab: --gpu 16 is 16,384 MiB (16 taken as GiB)\n"


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


@pytest.mark.parametrize(
    "base, said",
    [
        ([], "LoRA on fp32 weights"),
        (["--base", "half"], "LoRA on bf16 weights"),
        (["--base", "nf4"], "QLoRA on nf4 weights"),
    ],
)
def test_the_first_line_names_the_base_of_adapters(capsys, base, said):
    """`plan` takes the half base; without --base it is fp32, as under autocast."""
    options = ["--model", "llama-3-8b-tiny", "--seq-len", 16, "--lora-rank", 2]
    options += ["--precision", "bf16-amp", "--gpu", "L4", *base]
    status, out, _ = run(capsys, "simulate", *options)
    first, *_, last = out.splitlines()
    assert status == 0 and first.startswith(f"llama-3-8b-tiny, {said} on L4: fits, ")
    assert "; chance that it does not: below 1% (0 of " in first
    assert last.startswith("with --no-upcast: ") == ("nf4" in base)


def test_record_lists_and_selects(capsys):
    status, out, _ = run(capsys, "record", "--device", "cpu", "--list", "--only", "bert-large sgd")
    assert (status, out) == (0, "bert-large 4x512 sgd\n")
    status, out, _ = run(capsys, "record", "--device", "cpu", "--list", "--json")
    (runs,) = json.loads(out).values()  # without the text that a terminal shows
    assert status == 0 and len(runs) >= 60
    assert all(recipe["model"].endswith("-tiny") for recipe in runs.values())


def test_interrupted_recording_says_that_nothing_is_lost(capsys, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("memlab.evidence.recording.ask", interrupt)
    options = ["--device", "cpu", "--out", tmp_path, "--only", "bert-large sgd"]
    status, out, err = run(capsys, "record", *options)
    assert (status, out) == (130, "")
    assert "start again to continue" in err.splitlines()[-1]


@pytest.mark.parametrize("triton", [False, True])
def test_the_last_collection_is_left_out_where_nobody_counts_what_it_would_free(triton):
    code = "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
    code += "from memlab.cli import main; "
    code += "sys.modules['triton'] = gc; " * triton
    code += "main(['simulate', '--model', 'gpt2-tiny', '--seq-len', '0'])"
    assert run_python(code).stdout == f"{not triton}\n"
