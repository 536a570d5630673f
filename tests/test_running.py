"""A script from the disk inside a simulated card."""

import json

import pytest

from memlab.cli import main
from memlab.running import run_script

SCRIPT = """
import argparse, torch
from model import make
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
width = parser.parse_args().width
model = make(width).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range({steps}):
    loss = model(torch.randn(8, width, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {{step}}, loss {{loss:.2f}}")
"""
MODEL = """
import torch
def make(width):
    return torch.nn.Linear(width, width, bias=False)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(steps=50))
    return path


def test_it_ends_after_two_steps_and_says_which_lines_hold_what(script, capsys):
    ran = run_script(script, ["--width", "1024"], gpu="T4")
    assert ran.steps == 2 and not ran.error
    weights = 4 * 1024 * 1024
    held = ran.footprint.by_line()
    assert held["train.py:7"] == weights  # the line that moves the model, not the one that makes it
    assert held["train.py:11"] == weights  # gradients
    assert held["train.py:12"] >= 2 * weights  # AdamW's states, and what its step needs
    assert sum(held.values()) == ran.footprint.peak_allocated
    assert "optimizer.step()" in str(ran)
    assert capsys.readouterr().out.count("loss 1.00") == 1  # the second print comes after the end


def test_a_script_that_ends_by_itself_is_told_to_the_end(script):
    script.write_text(SCRIPT.format(steps=1))
    assert run_script(script).steps == 1


def test_the_command_gives_the_exit_status_of_simulate(script, tmp_path, capsys):
    assert main(["run", str(script), "--gpu", "T4", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("\n{") :])["steps"] == 2
    snapshot = tmp_path / "memory.pickle"
    tight = ["run", str(script), "--gpu", str(2**27), "--snapshot", str(snapshot)]
    assert main([*tight, "--", "--width", "8192"]) == 3
    said = capsys.readouterr()
    assert said.err.startswith(
        "memlab: train.py:7: CUDA out of memory. Tried to allocate 256.00 MiB"
    )
    assert "out of memory after 0 optimizer steps, in train.py:7" in said.out
    assert snapshot.stat().st_size > 0


@pytest.mark.parametrize(
    "line, said",
    [
        ("torch.compile(torch.nn.Linear(1, 1))", "train.py:1: torch.compile is not simulated"),
        ("torch.zeros(1, device='cuda:1')", "train.py:1: device is 'cuda:1'"),
    ],
)
def test_what_is_not_simulated_is_one_line_with_its_place(line, said, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(f"import torch; {line}")
    assert main(["run", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"memlab: {said}") and error.count("\n") == 1


def test_bad_input_is_one_line(tmp_path, capsys):
    assert main(["run", str(tmp_path / "none.py")]) == 2
    assert "is no file" in capsys.readouterr().err


def test_a_json_file_is_no_script(tmp_path, capsys):
    """Most of JSON is Python, too, and would end without a word."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert main(["run", str(tmp_path / "config.json"), "--gpu", "T4"]) == 2
    assert "config.json is a JSON file: allowed is a Python script" in capsys.readouterr().err
    (tmp_path / "empty.py").write_text("")
    assert main(["run", str(tmp_path / "empty.py"), "--steps", "0"]) == 2
    assert "allowed are whole numbers from 1" in capsys.readouterr().err
