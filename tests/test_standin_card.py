"""The stand-in for a card says and refuses what CUDA does."""

import multiprocessing

import pytest
import torch
from standin_card import stand_in
from torch import nn

from memlab import Recipe
from memlab.workloads.training import Training


@pytest.fixture(autouse=True)
def card():
    before = torch.cuda.is_available(), torch.Tensor.to, torch.Tensor.device
    with stand_in("T4") as card:
        yield card
    assert before == (torch.cuda.is_available(), torch.Tensor.to, torch.Tensor.device)


TWO_PLACES = "found at least two devices, cuda:0 and cpu!"


@pytest.mark.slow
@pytest.mark.parametrize(
    "forbidden, error, says",
    [
        (lambda here, there: there @ here, RuntimeError, TWO_PLACES),
        (lambda here, there: nn.Linear(2, 2)(there), RuntimeError, TWO_PLACES),
        (lambda here, there: here[there > 0], RuntimeError, TWO_PLACES),
        (lambda here, there: there.numpy(), TypeError, "can't convert cuda:0 device type tensor"),
        (lambda here, there: there.pin_memory(), RuntimeError, "cannot pin 'torch.cuda.FloatTens"),
        (
            lambda here, there: torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda"),
            torch.OutOfMemoryError,
            "CUDA out of memory. Tried to allocate",
        ),
    ],
)
def test_what_cuda_refuses_is_refused(forbidden, error, says):
    with pytest.raises(error, match=says):
        forbidden(torch.ones(2, 2), torch.ones(2, 2, device="cuda"))


def in_a_fork(tensor, answers):
    try:
        tensor.sum()
    except RuntimeError as error:
        answers.put(str(error))
    else:
        answers.put("")


@pytest.mark.slow
@pytest.mark.parametrize("device, says", [("cuda", "Cannot re-initialize CUDA"), ("cpu", "")])
def test_a_forked_worker_may_not_touch_the_card(device, says):
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=in_a_fork, args=(torch.ones(2, device=device), answers))
    child.start()
    assert answers.get(timeout=60).startswith(says)
    child.join()


def test_a_training_in_half_precision_learns_as_on_the_host():
    recipe = Recipe("gpt2-tiny", batch_size=2, seq_len=16, precision="fp16-amp")
    training = Training(recipe, "cuda")
    losses = [training.step() for _ in range(4)]
    assert training.model(**training.batches[0]).logits.is_cuda
    assert losses == [pytest.approx(loss) for loss in losses] and losses[-1] < losses[0]
