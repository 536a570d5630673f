"""The stand-in for a card says and refuses what CUDA does."""

import copy
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from memlab import Meter, Recipe, SimulatedGPU, gpus, simulate
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
def test_it_answers_as_the_card():
    assert torch.cuda.is_available() and torch.cuda.get_device_name() == "Tesla T4"
    assert torch.cuda.get_device_capability() == (7, 5)
    assert torch.cuda.mem_get_info()[1] == gpus.GPUS["T4"].total_memory
    assert torch.ones(1, device="cuda").is_cuda


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="cuda"),
        lambda: torch.ones(2, device=0),
        lambda: torch.tensor([1, 2], device="cuda:0"),
        lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda")),
        lambda: torch.ones(2).to("cuda", torch.float16),
        lambda: torch.ones(2).cuda(),
        lambda: torch.ones(2).to(torch.ones(1, device="cuda")),
        lambda: torch.zeros_like(torch.ones(2, device="cuda")),
        lambda: torch.ones(2, device="cuda")[:0],
        lambda: copy.deepcopy(torch.ones(2, device="cuda")),
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
def test_the_host_stays_the_host():
    assert torch.ones(2).device.type == "cpu"
    on_card = torch.ones(2, device="cuda")
    assert torch.zeros_like(on_card, device="cpu").device.type == "cpu"
    assert on_card.to(torch.ones(1)).device.type == "cpu"


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
def test_gradients_go_where_their_tensors_are():
    weight = torch.ones(2, 2, requires_grad=True)
    moved = weight.cuda()
    (moved * moved).sum().backward()
    assert weight.grad.device.type == "cpu" and torch.equal(weight.grad, 2 * torch.ones(2, 2))
    layer = nn.Linear(2, 2).cuda()
    checkpoint(layer, torch.ones(1, 2, device="cuda"), use_reentrant=False).sum().backward()
    assert layer.weight.grad.is_cuda


@pytest.mark.slow
def test_recomputation_meets_the_same_refusal():
    def mixes(x):
        return x * torch.ones(2)  # on the host

    x = torch.ones(2, device="cuda", requires_grad=True)
    with TWO_PLACES:
        checkpoint(mixes, x, use_reentrant=False)


@pytest.mark.slow
def test_what_is_saved_on_the_host_is_on_the_host():
    saved = []
    x = torch.ones(4, device="cuda", requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = x.exp()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y.exp()
    y.sum().backward()
    assert saved[0].is_cuda and x.grad.is_cuda


@pytest.mark.slow
def test_a_file_brings_a_tensor_back_to_where_it_was(tmp_path):
    kept = {"card": torch.ones(2, device="cuda"), "host": torch.ones(2)}
    torch.save(kept, tmp_path / "kept")
    back = torch.load(tmp_path / "kept")
    assert back["card"].is_cuda and not back["host"].is_cuda
    assert not torch.load(tmp_path / "kept", map_location="cpu")["card"].is_cuda


@pytest.mark.slow
def test_a_kernel_written_in_python_runs():
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(64, 64, device="cuda")
    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert codes.is_cuda and state.absmax.is_cuda
    assert (dequantize_4bit(codes, state) - weight).norm() < 0.2 * weight.norm()


@pytest.mark.slow
def test_a_product_of_a_cards_size_takes_no_time_of_the_cpu():
    left = torch.empty(2**17, 2**10, device="cuda", dtype=torch.float16)
    assert (left @ left[: 2**10].T).shape == (2**17, 2**10)


@pytest.mark.slow
def test_a_function_over_a_dimension_knows_its_place():
    table, rows = torch.arange(4, device="cuda"), torch.arange(4, device="cuda")
    found = torch.vmap(lambda row: table[row] + torch.ones((), device=row.device))(rows)
    assert found.is_cuda and found.tolist() == [1, 2, 3, 4]


@pytest.mark.slow
def test_what_pytorch_compiles_itself_runs():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = torch.arange(256, device="cuda") // 100
    mask = create_block_mask(
        lambda batch, head, i, j: document[i] == document[j], None, None, 256, 256, "cuda"
    )
    query = torch.randn(1, 1, 256, 16, device="cuda")
    out = flex_attention(query, query, query, block_mask=mask)
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, query, query, attn_mask=document[:, None] == document
    )
    assert out.is_cuda
    torch.testing.assert_close(out, whole)


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


@pytest.mark.slow
def test_the_meter_reads_the_counters():
    training = Training(Recipe("gpt2-tiny", batch_size=2, seq_len=16), "cuda")
    with Meter("cuda", empty_cache=False) as meter:
        training.step()
    assert meter.footprint.peak_allocated == torch.cuda.max_memory_allocated()


@pytest.mark.slow
def test_a_simulation_is_as_it_was_and_meets_no_real_card():
    recipe = Recipe("gpt2-tiny", batch_size=2, seq_len=16)
    beside = simulate(recipe, "T4")
    there = torch.ones(2, 2, device="cuda")
    with SimulatedGPU("T4"):
        assert there.is_cuda
        with pytest.raises(ValueError, match="meets a SimulatedGPU"):
            there @ torch.ones(2, 2, device="cuda")
    assert there.cpu().device.type == "cpu"  # the moves are back
    assert beside.peak_allocated == simulate(recipe, "T4").peak_allocated
