"""What a script has yet to do when its run ends, and `--phases`, which runs one of each."""

import pytest

from memlab.cli import main
from memlab.predict.script import run_script
from memlab.predict.trainer_phases import MOST_READ, text_sizes

MiB = 2**20
TRAINER = """
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from memlab import models

def texts(lengths):
    ids = [[5 + i % 90 for i in range(n)] for n in lengths]
    return Dataset.from_dict({{"input_ids": ids, "labels": ids}})

def padded(rows):
    import torch
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([(row["input_ids"] + [5] * longest)[:longest] for row in rows])
    return {{"input_ids": ids, "labels": ids}}

def scores(prediction):
    return {{"rows": len(prediction.predictions)}}

arguments = TrainingArguments(
    {folder!r}, per_device_train_batch_size=2, max_steps=1000, report_to="none", disable_tqdm=True,
    save_strategy="epoch", {more}
)
Trainer(
    models.build("gpt2-tiny"), arguments, padded, texts([8] * 60 + [64] * 2),
    texts([64] * 200), compute_metrics={metrics},
).train()
"""


@pytest.fixture
def script(tmp_path):
    def write(
        more="eval_strategy='steps', eval_steps=0.5, per_device_eval_batch_size=4", metrics="None"
    ):
        path = tmp_path / "train.py"
        path.write_text(TRAINER.format(folder=str(tmp_path / "made"), more=more, metrics=metrics))
        return path

    return write


def test_it_says_what_the_trainer_has_still_before_it(script, capsys):
    assert main(["run", str(script()), "--gpu", "T4"]) == 0
    first, ended, left, *_ = capsys.readouterr().out.splitlines()[-40:]
    assert "train.py on T4: fits, " in first and "of 14.56 GiB" in first and "margin" in first
    assert ended == "2 optimizer steps"
    assert left == (
        "not run: evaluation every 500 steps in batches of 4, saving after each epoch, batches of "
        "the longest text (8.0 times the median); --phases runs one of each"
    )


@pytest.mark.parametrize(
    "more, said",
    [
        (
            "eval_strategy='steps', eval_steps=500, eval_on_start=True",
            "saving after each epoch, batches of",
        ),
        ("eval_strategy='epoch'", "evaluation after each epoch in batches of 8, saving"),
        ("eval_strategy='no'", "evaluation on request in batches of 8, saving"),
    ],
)
def test_what_is_left_follows_from_the_trainers_arguments(more, said, script):
    ran = run_script(script(more), gpu="T4")
    assert ran.phases[0].startswith(f"not run: {said}")


def test_one_of_each_phase_runs_by_the_trainers_own_code(script, tmp_path):
    plain, every = (run_script(script(), gpu="T4", phases=phases) for phases in (False, True))
    (line,) = every.phases
    assert line.startswith("peak reserved, on the longest texts: training ")
    assert ", evaluation " in line and ", saving " in line
    assert every.steps == 2 and not every.error
    assert every.footprint.peak_allocated > plain.footprint.peak_allocated  # 64 tokens, not 8
    assert not list((tmp_path / "made").glob("checkpoint*"))  # saved elsewhere, and removed


def test_an_evaluation_that_does_not_fit_is_found(script, capsys):
    text = str(script("eval_strategy='steps', eval_steps=500, per_device_eval_batch_size=200"))
    trained = run_script(text, gpu="T4")
    card = str(trained.footprint.peak_reserved + 10 * MiB)
    assert main(["run", text, "--gpu", card]) == 0
    capsys.readouterr()
    assert main(["run", text, "--gpu", card, "--phases"]) == 3
    said = capsys.readouterr()
    assert "does not fit, out of memory in evaluation after 2 optimizer steps" in said.out
    assert "CUDA out of memory" in said.err


def test_an_evaluation_that_keeps_its_predictions_has_all_texts(script):
    more = "eval_strategy='steps', eval_steps=500, per_device_eval_batch_size=50"
    few, all_of_them = (
        run_script(script(more, metrics), gpu="T4", phases=True) for metrics in ("None", "scores")
    )
    assert all_of_them.footprint.peak_allocated > few.footprint.peak_allocated


def test_of_a_long_dataset_the_first_texts_are_read():
    from datasets import Dataset

    more = MOST_READ + 1
    rows = [{"input_ids": [1]}] * MOST_READ + [{"input_ids": [1, 2, 3]}]
    assert len(text_sizes(Dataset.from_dict({"input_ids": [[1]] * more}))) == MOST_READ
    assert text_sizes(rows) == [1] * MOST_READ


STEPS = """
import torch
m = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(m.parameters(), 0.1)
for step in range({steps}):
    m(torch.randn({rows}, 512, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "rows, steps, said",
    [
        ("8", 9, ("not run: what the script does after",)),
        ("8 * (1 + step)", 9, ("the steps differ in size", "not run: what the script does after")),
        ("8", 2, ("not run: what the script does after",)),
        ("8", 1, ("one step: the next one starts",)),
    ],
)
def test_a_loop_of_ones_own(rows, steps, said, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(STEPS.format(rows=rows, steps=steps))
    ran = run_script(path, gpu="T4")
    assert len(ran.phases) == len(said)
    assert all(line.startswith(begin) for line, begin in zip(ran.phases, said, strict=True))
    asked = run_script(path, gpu="T4", phases=True)
    assert asked.phases[-1].startswith("--phases: no Trainer of transformers was running")


@pytest.mark.parametrize("steps, said", [(2, "--steps 25 "), (7, "--steps 28 "), (10, "")])
def test_more_steps_are_offered_where_there_are_more(steps, said, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(STEPS.format(rows="8 * (1 + step)", steps=9))
    ran = run_script(path, gpu="T4", steps=steps)
    assert said in "".join(ran.phases) and bool(ran.phases) == bool(said)


def test_a_run_that_fits_only_without_the_margin_does_not_fit(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(STEPS.format(rows=8, steps=9))
    peak = run_script(path, gpu="T4").footprint.peak_reserved
    assert main(["run", str(path), "--gpu", str(peak * 102 // 100)]) == 3
    first = capsys.readouterr().out.splitlines()[0]
    assert "fits only without the margin of" in first and "chance that it does not: " in first
    assert main(["run", str(path), "--gpu", str(peak * 106 // 100)]) == 0


@pytest.mark.parametrize("steps", [0, 1])
def test_seconds_are_those_of_a_whole_step(steps, tmp_path):
    """The first has all that came before it; without a step there is none to be timed."""
    path = tmp_path / "train.py"
    path.write_text(STEPS.format(rows=8, steps=steps))
    assert run_script(path, gpu="T4").footprint.step_time is None
    path.write_text(STEPS.format(rows=8, steps=2))
    assert run_script(path, gpu="T4").footprint.step_time is not None
