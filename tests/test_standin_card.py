"""The stand-in for a card says and refuses what CUDA does."""

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from memlab import Recipe, gpus
from memlab.workloads.training import Training

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from standin_card import stand_in

MiB = 2**20
TWO_PLACES = pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu!")


@pytest.fixture(autouse=True)
def card():
    before = torch.cuda.is_available(), torch.Tensor.to, torch.Tensor.device
    with stand_in("T4") as card:
        yield card
    assert before == (torch.cuda.is_available(), torch.Tensor.to, torch.Tensor.device)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="cuda"),
        lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda")),
        lambda: torch.ones(2).to("cuda", torch.float16),
        lambda: torch.ones(2).to(torch.ones(1, device="cuda")),
        lambda: torch.zeros_like(torch.ones(2, device="cuda")),
        lambda: nn.Linear(2, 2).to("cuda").weight,
        lambda: nn.Linear(2, 2, device="cuda")(torch.ones(1, 2, device="cuda")),
    ],
)
def test_what_is_made_on_the_card_says_so(make):
    tensor = make()
    assert tensor.device == torch.device("cuda", 0) and tensor.get_device() == 0
    assert tensor.is_cuda and not tensor.is_cpu
    back = tensor.cpu()
    assert back.device.type == "cpu" and not back.is_cuda
    assert torch.equal(back, tensor.to("cpu"))


@pytest.mark.slow
def test_tensors_of_two_places_do_not_meet():
    here, there = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
    for mixed in (lambda: there @ here, lambda: here + there, lambda: nn.Linear(2, 2)(there)):
        with TWO_PLACES:
            mixed()
    with TWO_PLACES:
        here[there > 0]
    assert (there + torch.tensor(1.0)).is_cuda  # a number may
    assert there[here > 0].is_cuda  # and so may an index
    here.copy_(there)
    assert not here.is_cuda


@pytest.mark.slow
def test_numpy_does_not_read_the_card():
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        torch.ones(2, device="cuda").numpy()
    assert torch.ones(2, device="cuda").cpu().numpy().sum() == 2


@pytest.mark.slow
def test_only_the_host_is_pinned():
    with pytest.raises(RuntimeError, match="cannot pin 'torch.cuda.FloatTensor'"):
        torch.ones(2, device="cuda").pin_memory()
    assert torch.ones(2).pin_memory().is_pinned() and not torch.ones(2).is_pinned()
    assert torch.empty(2, pin_memory=True).is_pinned()
    (batch,) = DataLoader(torch.ones(4), batch_size=4, pin_memory=True)
    assert batch.is_pinned()


@pytest.mark.slow
def test_the_counters_count_blocks_and_workspaces():
    before = torch.cuda.memory_allocated()
    block = torch.empty(3 * MiB + 1, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 3 * MiB + 512
    del block
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 3 * MiB + 512
    torch.cuda.empty_cache()
    square = torch.ones(2, 2, device="cuda")
    square @ square
    assert torch.cuda.memory_allocated() - before == 512 + gpus.GPUS["T4"].workspace


@pytest.mark.slow
def test_a_full_card_runs_out_of_memory():
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory. Tried to allocate"):
        torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")


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
