"""A script from the disk inside a simulated card."""

import json
import os
import re
import signal
import sys
import time
from concurrent import futures

import pytest

from memlab.cli import main
from memlab.predict import script_progress
from memlab.predict.script import run_script, try_script

MiB = 2**20
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


@pytest.fixture
def run(tmp_path, capsys):
    """run(text, *options): (status, out, err) of `memlab run` of a script with this text."""

    def ran(text, *options):
        path = tmp_path / "train.py"
        path.write_text(f"import torch\n{text}")
        return main(["run", str(path), *options]), *capsys.readouterr()

    return ran


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


def test_a_script_sets_the_allocator_before_its_first_tensor(script):
    wide = ["--width", "1800"]
    plain = run_script(script, wide, gpu="T4")
    code = "import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'\n"
    script.write_text(code + SCRIPT.format(steps=2))
    grow = run_script(script, wide, gpu="T4")
    assert grow.footprint.peak_tensors == plain.footprint.peak_tensors
    # The large pool has granules of 20 MiB, the small one of 2 MiB.
    assert grow.footprint.peak_reserved % (20 * MiB) == 2 * MiB
    assert plain.footprint.peak_reserved % (20 * MiB) != 2 * MiB
    assert "PYTORCH_ALLOC_CONF: expandable_segments:True" in str(grow)
    assert "PYTORCH_ALLOC_CONF" not in os.environ  # it was the script's
    said = run_script(script.with_name("model.py"), gpu="T4").footprint.assumptions
    # Of TRL it is said where it is imported, as by other tests of the process.
    assert not [one for one in said if "Triton" not in one]


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
        ("torch.compile(torch.nn.Linear(1, 1))", "train.py:2: torch.compile is not simulated"),
        ("torch.zeros(1, device='cuda:1')", "train.py:2: device is 'cuda:1'"),
    ],
)
def test_what_is_not_simulated_is_one_line_with_its_place(line, said, run):
    status, _, error = run(line)
    assert status == 2 and error.startswith(f"memlab: {said}") and error.count("\n") == 1


def test_arguments_of_the_script_without_a_mark_are_sent_behind_it(capsys):
    with pytest.raises(SystemExit):
        main(["run", "train.py", "--gpu", "T4", "--batch_size", "8"])
    said = "memlab: unrecognized arguments: --batch_size 8; arguments of the script go after --\n"
    assert capsys.readouterr().err == said
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt2", "--batch_size", "8"])
    assert "script" not in capsys.readouterr().err


STEP = """
w = torch.nn.Parameter(torch.randn(512, 512, device="cuda"))
torch.optim.SGD([w], 0.1).step()
"""


def test_a_scripts_own_exception_keeps_its_traceback_and_what_was_seen_is_told(run):
    text = f"def check(x):\n    raise ValueError('bad thing')\n{STEP}\ncheck(1)\n"
    status, out, err = run(text)
    first, *_, last = err.splitlines()
    assert status == 1 and first.startswith("Traceback") and last == "ValueError: bad thing"
    assert err.count('train.py", line') == 2 and "memlab" not in err
    card, ended, *_ = out.splitlines()
    assert "no card is named" in card
    assert ended == "ended after 1 optimizer step, in train.py:3"
    assert "1.0 MiB  train.py:5" in out


@pytest.mark.parametrize(
    "ending, status, said",
    [
        ("import sys; sys.exit(3)", 3, "the script ended with status 3"),
        ("raise SystemExit('no data found')", 1, "no data found"),
        ("raise SystemExit(0)", 0, ""),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_a_script_ends_with_its_own_status(ending, status, said, run):
    ended, out, err = run(f"{STEP}\n{ending}")
    assert ended == status and said in err and err.count("\n") == bool(said)
    assert "1.0 MiB" in out and "does not fit" not in out


def test_a_script_that_trains_nothing_is_answered(run):
    """Generation, an evaluation alone, a merge of adapters."""
    text = "kept = torch.zeros(2**20, device='cuda')"
    status, out, err = run(text, "--gpu", "T4")
    assert status == 0 and "nothing was trained" in out and not err
    status, out, _ = run(text, "--gpu", str(2**20))
    assert status == 3 and "does not fit, out of memory after 0 optimizer steps" in out


def test_a_script_that_puts_nothing_on_the_card_is_no_success(run):
    status, out, err = run("print(torch.cuda.device_count())", "--gpu", "T4")
    assert status == 1 and err == "memlab: the script ended without putting a tensor on the card\n"
    assert "no verdict" in out


LOSES_ONE = """
for _ in range(10**9):
    try:
        time.sleep(0.001)
    except KeyboardInterrupt:
        break
while True:
    time.sleep(0.001)
"""


@pytest.mark.parametrize("on", ["while True:\n    time.sleep(0.001)", LOSES_ONE])
def test_a_script_that_goes_on_is_stopped_at_the_limit(on, run):
    """Also where an interrupt is lost, as Python loses those that come while an object dies."""
    text = f"import time\n{STEP}\nx = torch.ones(4, device='cuda')\n{on}"
    status, out, err = run(text, "--limit-minutes", "0.02")
    assert status == 124 and "1.0 MiB" in out
    assert "stopped after 0.02 minutes" in err and err.count("\n") == 1


def test_what_runs_for_long_says_where_it_is_on_a_terminal_alone(run, monkeypatch):
    text = "x = torch.ones(4, device='cuda')\nwhile True:\n    x + 1"
    monkeypatch.setattr(script_progress, "EVERY", 0.1)
    status, _, said = run(text, "--limit-minutes", "0.02")
    assert status == 124 and said.count("\n") == 1
    assert "stopped after 0.02 minutes before the first optimizer step: no answer" in said
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    status, _, said = run(text, "--limit-minutes", "0.02")
    assert status == 124 and ", 0 optimizer steps, now in train.py:4\n" in said


def test_a_limit_holds_where_interrupts_are_ignored(run):
    """A shell starts what runs in its background so, and Python then has no handler for them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        text = f"import time\n{STEP}\nfor _ in range(10**4):\n    time.sleep(0.001)"
        status, _, err = run(text, "--limit-minutes", "0.02")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 124 and "stopped after 0.02 minutes" in err


def test_a_limit_stops_the_thread_that_runs_the_script_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import time, torch\n{STEP}\nfor _ in range(10**4):\n    time.sleep(0.001)")
    with futures.ThreadPoolExecutor() as pool:
        ended = pool.submit(try_script, path, limit_minutes=0.02)
        for _ in range(500):  # here nothing is interrupted
            time.sleep(0.01)
            if ended.done():
                break
        assert "stopped after 0.02 minutes" in ended.result().error


@pytest.mark.parametrize(
    "update",
    [
        "with torch.no_grad(): w -= 0.1 * w.grad; b -= 0.1 * b.grad",
        "w.data.sub_(w.grad, alpha=0.1); b.data -= 0.1 * b.grad",
        "with torch.no_grad(): torch._foreach_add_([w, b], [w.grad, b.grad], alpha=-0.1)",
    ],
)
@pytest.mark.parametrize("kind", ["torch.nn.Parameter({})", "{}.requires_grad_()"])
def test_weights_that_are_changed_by_hand_make_a_step(update, kind, run):
    weight = kind.format("torch.randn(512, 512, device='cuda')")
    bias = kind.format("torch.randn(512, device='cuda')")
    text = f"""
w, b = {weight}, {bias}
for step in range({{steps}}):
    for micro in range(2):
        (torch.randn(8, 512, device="cuda") @ w + b).square().mean().backward()
    {update}
    w.grad.zero_(); b.grad = None
"""
    for steps, said in ((10**9, "2 optimizer steps"), (1, "1 optimizer step")):
        status, out, _ = run(text.format(steps=steps))
        assert status == 0 and out.splitlines()[1] == said and "differ in size" not in out


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_weights_that_are_changed_by_hooks_of_the_backward_pass_make_a_step(reentrant, run):
    """Also where a checkpoint has a backward pass of its own inside."""
    text = f"""
from torch.utils.checkpoint import checkpoint
layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(3)).cuda()
@torch.no_grad()
def update(p):
    p.add_(p.grad, alpha=-0.1); p.grad = None
for p in layers.parameters():
    p.register_post_accumulate_grad_hook(update)
for step in range(10**9):
    x = torch.randn(8, 512, device="cuda", requires_grad=True)
    for layer in layers:
        x = layer(x) if {reentrant} is None else checkpoint(layer, x, use_reentrant={reentrant})
    x.sum().backward()
    print(f"step {{step}}")
"""
    status, out, _ = run(text)
    assert status == 0 and out.count("step ") == 2 and "2 optimizer steps" in out


@pytest.mark.parametrize("every, steps, fewer", [(2, 4, False), (5, 6, True), (100, 6, True)])
def test_a_generator_that_is_trained_less_often_than_its_critic_is_waited_for(
    every, steps, fewer, run
):
    text = f"""
critic, generator = torch.nn.Linear(512, 1).cuda(), torch.nn.Linear(512, 512).cuda()
optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, generator)]
unused = torch.optim.Adam(generator.parameters()); del unused
try:
    for step in range(1, 50):
        critic(torch.randn(8, 512, device="cuda")).mean().backward()
        optimizers[0].step()
        if step % {every} == 0:
            critic(generator(torch.randn(8, 512, device="cuda"))).mean().backward()
            optimizers[1].step()
finally:
    optimizers.clear()  # as with the names of a script that has ended
"""
    status, out, _ = run(text)
    assert status == 0 and out.splitlines()[1] == f"{steps} optimizer steps"
    made = steps // every
    assert (f"one optimizer has made {made} of these 6 steps" in out) == fewer
    assert bool(re.search(r"optimizer states +2\.0 MiB", out)) == (made > 0)


def test_a_moving_average_of_the_weights_is_no_step(run):
    text = """
import copy
m = torch.nn.Linear(64, 64).cuda()
ema, optimizer = copy.deepcopy(m), torch.optim.SGD(m.parameters(), 0.1)
for step in range(100):
    m(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    print(f"step {step}")
    with torch.no_grad():
        for mine, its in zip(ema.parameters(), m.parameters()):
            mine.mul_(0.9).add_(its, alpha=0.1)
"""
    status, out, _ = run(text, "--steps", "5")
    assert status == 0 and out.count("step ") == 4


def test_it_starts_a_script_as_torchrun_does(run):
    text = """
import os
import torch.distributed as dist
dist.init_process_group("nccl")
assert torch.cuda.device_count() == dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 4
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.randn(8, 64, device="cuda")).mean().backward()
optimizer.step()
"""
    assert run(text, "--ranks", "4")[0] == 0


def test_ranks_of_one_are_torchruns_and_none_are_pythons(run):
    text = """
import os
print("LOCAL_RANK" in os.environ)
torch.distributed.init_process_group("nccl")
print(torch.distributed.get_world_size(), os.environ["LOCAL_RANK"])
"""
    assert run(text, "--ranks", "1")[1].startswith("True\n1 0\n")
    status, out, err = run(text)
    assert status == 2 and out.startswith("False\n") and "--ranks N" in err
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_runs_as_python_m_does(name, tmp_path, monkeypatch, capsys):
    package = tmp_path / "package"
    package.mkdir()
    (package / "model.py").write_text(MODEL)
    (package / "__init__.py").write_text("import torch\nassert torch.cuda.is_available()\n")
    code = SCRIPT.format(steps=5).replace("from model", "from .model")
    (package / ("__main__.py" if name == "package" else "train.py")).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))  # the package ends with the test
    assert main(["run", "-m", name, "--gpu", "T4", "--", "--width", "64"]) == 0
    out = capsys.readouterr().out
    assert "2 optimizer steps" in out and "optimizer.step()" in out
    assert main(["run", "-m", f"{name}.nowhere"]) == 2
    assert "nowhere is not a module that Python finds" in capsys.readouterr().err


def test_compiled_code_runs_eagerly_where_that_is_asked_for(run):
    text = f"f = torch.compile(torch.nn.Linear(4, 4).cuda())\n{STEP}"
    status, _, err = run(text)
    assert status == 2 and "--compile-eagerly" in err
    status, out, _ = run(text, "--compile-eagerly")
    assert status == 0 and "assumed: torch.compile: the code ran uncompiled" in out


def test_it_says_why_a_card_has_no_seconds(run):
    text = """
m = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(m.parameters(), 0.1)
for _ in range(2):
    m(torch.ones(8, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
"""
    for code, options, status, why in (
        (text, ["--gpu", "T4"], 0, ": T4 has no rate for bfloat16"),
        ("", ["--gpu", "T4"], 1, ": no operator has run on the card"),
        (text, ["--gpu", "L4"], 0, None),
        (text, [], 0, None),  # nor does a card without a name have any
    ):
        ended, out, _ = run(code, *options)
        assert ended == status
        assert f"no seconds{why}" in out if why else "no seconds" not in out


def test_what_is_no_script_is_refused(tmp_path, capsys):
    assert main(["run", str(tmp_path / "none.py")]) == 2
    assert "is not a file" in capsys.readouterr().err
    (tmp_path / "empty.py").write_text("")
    assert main(["run", str(tmp_path / "empty.py"), "--steps", "0"]) == 2
    assert "allowed are whole numbers from 1" in capsys.readouterr().err
