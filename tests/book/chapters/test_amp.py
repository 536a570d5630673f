"""What autocast gives and keeps, and small trainings in its formats."""

import pytest
import torch

from memlab import Recipe
from memlab.book.chapters import amp_bytes, amp_training


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_modules_under_autocast_give_what_cudas_list_says():
    gave = amp_bytes.formats_given()
    assert gave["Linear"] == ["float16"]
    assert gave["Embedding"] == gave["LayerNorm"] == ["float32"]
    assert gave["the loss"] == gave["every .grad"] == ["float32"]


def test_the_first_saving_batch_is_the_first_and_found_or_said_to_be_none():
    recipe = Recipe("bert-large", seq_len=512, set_to_none=False)
    assert amp_bytes.first_saving_batch(recipe.but(optimizer="adamw_torch_loop")) == 2
    with pytest.raises(ValueError, match="none of 1 to 99"):
        amp_bytes.first_saving_batch(recipe.but(seq_len=1))


def test_published_runs_and_speeds_with_their_range():
    runs = amp_bytes.published_runs()
    assert len(runs) == 4 and (runs["seconds"] > 0).all()
    assert runs["MiB"].iloc[1] < runs["MiB"].iloc[0]
    assert runs["MiB"].iloc[2] < runs["MiB"].iloc[3]  # where memory is short fp16 takes more
    speed = amp_bytes.speeds()
    assert (speed["slow"] < speed["samples/s"]).all() and (speed["samples/s"] < speed["fast"]).all()
    assert (speed["times fp32"].unstack()["fp32"] == 1).all()


def test_scaled_fp16_and_bf16_learn_like_fp32_and_unscaled_fp16_does_not():
    _, seen = amp_training.text()
    ends = {way: [amp_training.learn(seen, way, 1)] for way in amp_training.WAYS}
    right = ends["fp32"]
    assert right[0][-1] < right[0][0] - 0.5
    above = {way: amp_training.ends_above(runs, right)[0] for way, runs in ends.items()}
    assert abs(above["bf16 autocast"]) < 0.03 and abs(above["fp16, scaled"]) < 0.03
    assert above["fp16, unscaled"] > 0.1
    few = (amp_training.learn(seen, way, 1, window=1) for way in ("fp16, unscaled", "fp32"))
    assert abs(amp_training.ends_above(*([run] for run in few))[0]) < 0.01  # 256 tokens a step


def test_a_loss_outside_is_fp16_and_a_smaller_scale_is_finite():
    _, seen = amp_training.text()
    assert amp_training.loss_and_gradients(seen[:8], True) == ("float32", True)
    assert amp_training.loss_and_gradients(seen[:8], False, 2.0**15) == ("float16", True)
    _, scales = amp_training.printed_loop(seen, True, inside=False, interval=2000, steps=4)
    assert scales == [2.0**15] * 4  # cleared: one step is lost, and no more
