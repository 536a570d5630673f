"""A measured step moves all seconds of its card, and no byte."""

import json

import pytest
from helpers import refused

from memlab import Recipe, anchored, find_gpu, plan, simulate
from memlab.card.step_time import ANCHORED
from memlab.cli import main

STEP = Recipe("gpt2-tiny", batch_size=4, seq_len=64, precision="fp16-amp", attention="sdpa")
STEP = STEP.but(optimizer="adamw_torch_fused", max_grad_norm=1.0)
OTHER = STEP.but(model="bert-base-tiny", batch_size=8)


def test_the_measured_step_is_met_and_others_keep_their_ratio():
    plain, slow = find_gpu("T4"), anchored("T4", STEP, 0.5)
    assert simulate(STEP, slow).step_seconds.expected == pytest.approx(0.5)
    before, after = simulate(OTHER, plain), simulate(OTHER, slow)
    ratio = 0.5 / simulate(STEP, plain).step_seconds.expected
    seconds = after.step_seconds
    assert seconds.expected == pytest.approx(ratio * before.step_seconds.expected)
    assert sum(seconds.parts.values()) == pytest.approx(seconds.expected)
    assert seconds.high / seconds.expected == pytest.approx(ANCHORED)
    assert seconds.expected / seconds.low == pytest.approx(ANCHORED)
    assert (after.peak_allocated, after.peak_reserved) == (
        before.peak_allocated,
        before.peak_reserved,
    )


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_seconds_that_are_none(seconds):
    with refused("step_seconds is"):
        anchored("T4", STEP, seconds)


def test_a_card_without_rates_has_no_seconds_to_put_right():
    with refused("no seconds"):
        anchored("12 GiB", STEP, 0.5)


@pytest.fixture
def measured(tmp_path):
    """What `memlab measure --json` prints on a T4."""
    said = {"recipe": STEP.as_dict(), "step_seconds": {"median": 0.5}, "device": "Tesla T4"}
    file = tmp_path / "step.json"
    file.write_text(json.dumps(said))
    return str(file)


def test_the_command_says_by_what_its_seconds_are_put_right(measured, capsys):
    asked = ["--model", "gpt2-tiny", "--batch-size", "4", "--seq-len", "64"]
    asked += ["--precision", "fp16-amp", "--attention", "sdpa"]
    asked += ["--optimizer", "adamw_torch_fused", "--max-grad-norm", "1"]
    assert main(["simulate", *asked, "--gpu", "T4", "--anchor", measured]) == 0
    out = capsys.readouterr().out
    assert "500 ms" in out and "measured for gpt2-tiny 4 x 64 on Tesla T4" in out.splitlines()[-1]
    assert main(["simulate", *asked, "--gpu", "T4", "--anchor", measured, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step_seconds"]["expected"] == pytest.approx(0.5) and "anchor" in said


def test_a_plan_has_the_pace_of_its_card():
    asked = {"seq_len": 64, "effective_batch": 2, "ways": "full", "precisions": "fp16-amp"}
    card = anchored("T4", STEP, 3.0)
    plain, slow = plan("gpt2-tiny", "T4", **asked), plan("gpt2-tiny", card, **asked)
    assert slow.fastest.recipe == plain.fastest.recipe
    assert slow.fastest.seconds == pytest.approx(card.pace * plain.fastest.seconds)


@pytest.mark.parametrize("gpu", ["L4", "15 GiB"])
def test_a_step_says_nothing_of_another_card(measured, gpu, capsys):
    assert main(["simulate", "--model", "gpt2-tiny", "--gpu", gpu, "--anchor", measured]) == 2
    assert "allowed is Tesla T4, the card of" in capsys.readouterr().err


def test_a_file_of_another_kind_is_one_line(tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_text('{"recipe": 3}')
    assert main(["plan", "--model", "gpt2", "--gpu", "T4", "--anchor", str(file)]) == 2
    err = capsys.readouterr().err
    assert "is not what `memlab measure --json` prints" in err and err.count("\n") == 1
