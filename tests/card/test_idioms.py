"""Small idioms of training code on the simulated card: each works, or is refused in one line."""

import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import allocated, refused
from torch import nn
from torch.func import functional_call, grad, jacfwd, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, random_split

from memlab import SimulatedGPU
from memlab.card.placement import NotSimulated


@pytest.fixture
def gpu():
    torch.manual_seed(0)
    with SimulatedGPU("A100-40GB") as card:
        yield card


def small():
    """A model, its optimizer, and a loss that has a graph."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    x, y = torch.randn(8, 64, device="cuda"), torch.randint(4, (8,), device="cuda")
    return model, torch.optim.AdamW(model.parameters()), F.cross_entropy(model(x), y)


# ---------------------------------------------------------------------- values that are read


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (lambda loss: f"{loss:.4f}", "1.0000"),
        (lambda loss: "%.2f" % loss, "1.00"),  # noqa: UP031
        (lambda loss: loss.detach().cpu().numpy().item(), 1.0),
        (lambda loss: loss.detach().cpu().tolist(), 1.0),
        (lambda loss: bool(loss < float("inf")), True),
        (lambda loss: bool(torch.isnan(loss)), False),
        (lambda loss: bool(torch.isfinite(loss)), True),
    ],
)
def test_a_loss_reads_as_one_and_guards_are_quiet(gpu, read, given):
    assert read(small()[2]) == given


def test_numpy_wants_a_copy_on_the_host(gpu):
    with pytest.raises(TypeError, match="cuda:0 device type tensor to numpy"):
        torch.ones(3, device="cuda").numpy()
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ones(3, device="cuda", requires_grad=True).cpu().numpy()


# ---------------------------------------------------------------------- shapes that follow values

KNOWN = [3, 0, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("shape", "exact", "largest", "said"),
    [
        (lambda y: torch.nonzero(y), (4, 1), (6, 1), "nonzero"),
        (lambda y: torch.where(y > 1)[0], (3,), (6,), "nonzero"),
        (lambda y: torch.randn(6, 8, device="cuda")[y > 1], (3, 8), (6, 8), "boolean masks"),
        (lambda y: torch.unique(y), (4,), (6,), "unique"),
        (lambda y: torch.unique_consecutive(y), (6,), (6,), "unique"),
        (lambda y: torch.bincount(y, minlength=3), (4,), (3,), "minlength bins"),
        (lambda y: torch.masked_select(y, y > 1), (3,), (6,), "boolean masks"),
    ],
    ids=["nonzero", "where", "mask", "unique", "consecutive", "bincount", "masked_select"],
)
def test_the_shape_is_exact_where_values_are_known_and_the_largest_where_not(
    gpu, shape, exact, largest, said
):
    assert shape(torch.tensor(KNOWN).cuda()).shape == exact
    assert gpu.footprint.assumptions == ()
    unknown = torch.randn(6, 7, device="cuda").argmax(dim=1) + 2
    assert shape(unknown).shape == largest
    assert any(said in assumed for assumed in gpu.footprint.assumptions)
    assert gpu.footprint.assumptions[0] in str(gpu.footprint)


@pytest.mark.parametrize(
    ("use", "instead"),
    [
        (lambda x: torch.bincount(x), "Give minlength"),
        (lambda x: torch.repeat_interleave(x), "Give output_size"),
        (lambda x: torch.rand(2**20).nonzero(), "takes more than 1.0 MiB"),
    ],
)
def test_a_shape_without_a_largest_is_refused(gpu, use, instead):
    with refused(instead, kind=NotSimulated):
        use(torch.randn(6, 7, device="cuda").argmax(dim=1))


def test_packed_sequences_hold_their_tokens_and_no_padding(gpu):
    layer = nn.LSTM(8, 16, batch_first=True).cuda()
    x = torch.randn(3, 9, 8, device="cuda", requires_grad=True)
    packed = pack_padded_sequence(x, torch.tensor([9, 7, 5]), batch_first=True)
    assert packed.data.shape == (21, 8)
    out, _ = layer(packed)
    assert out.data.shape == (21, 16)
    padded, lengths = pad_packed_sequence(out, batch_first=True)
    assert padded.shape == (3, 9, 16) and padded.is_cuda
    assert lengths.tolist() == [9, 7, 5]
    padded.sum().backward()
    assert x.grad.shape == x.shape
    assert any("cuDNN" in assumed for assumed in gpu.footprint.assumptions)


@pytest.mark.parametrize(
    ("lengths", "batch_first", "copied"),
    [
        ([64, 64], False, 0),  # one contiguous block, of which no copy is made
        ([64, 64], True, 128),
        ([64, 32], False, 32),  # the first 32 steps are contiguous
        ([64, 32], True, 64),  # and so is what is left of one sequence
        ([64], True, 0),
    ],
)
def test_packing_keeps_its_copies_until_the_result_is_filled(gpu, lengths, batch_first, copied):
    token = 1024 * 4
    shape = (len(lengths), 64) if batch_first else (64, len(lengths))
    x = torch.randn(*shape, 1024, device="cuda")
    gpu.reset_peak()
    pack_padded_sequence(x, torch.tensor(lengths), batch_first=batch_first)
    peak = torch.cuda.max_memory_allocated() - x.nbytes
    assert peak == token * (copied + sum(lengths))


@pytest.mark.parametrize("kind, numbers", [(nn.LSTM, 4 + 1 + 1), (nn.GRU, 3 + 1)])
def test_a_recurrent_layer_keeps_its_gates_and_states(gpu, kind, numbers):
    """Of each unit and token; the host's own kernel would keep a sixth of it."""
    layer = kind(64, 64, batch_first=True).cuda()
    x = torch.randn(8, 100, 64, device="cuda")
    before = allocated()
    out, states = layer(x)
    assert allocated() - before >= numbers * out.nbytes


def test_lbfgs_says_that_its_history_does_not_grow_here(gpu):
    layer = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.LBFGS(layer.parameters())

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.randn(8, 4, device="cuda")).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert any("LBFGS" in said for said in gpu.footprint.assumptions)


def test_gradients_of_each_sample_by_function_transforms(gpu):
    layer = nn.Linear(64, 4).cuda()
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    x, y = torch.randn(8, 64, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")

    def loss(weights, sample, answer):
        return nn.functional.cross_entropy(functional_call(layer, weights, sample), answer)

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    assert {name: one.shape for name, one in found.items()} == {
        "weight": (8, 4, 64),
        "bias": (8, 4),
    }
    assert all(one.is_cuda for one in found.values())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.arange(8, device=x.device),
        lambda x: x * torch.zeros(8).to(x),
        lambda x: F.dropout(x),
        lambda x: jacfwd(jacfwd(lambda x: F.linear(x[None], x[None]).tanh().sum()))(x),
        lambda x: grad(lambda x: (x.cuda() + torch.ones(8, device=x.device)).sum())(x),
    ],
)
def test_inside_function_transforms_tensors_lie_where_they_lie_outside(gpu, function):
    x = torch.randn(4, 8, device="cuda")
    assert vmap(function, randomness="different")(x).is_cuda
    assert not vmap(lambda row: row.cpu())(x).is_cuda


# ---------------------------------------------------------------------- data


class Ragged(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((i + 1,), i)


def padded(rows):
    width = max(map(len, rows))
    return torch.stack([F.pad(row, (0, width - len(row))) for row in rows])


def test_ragged_shuffled_batches_have_the_widths_of_a_run_without_a_card():
    def widths(**settings):
        torch.manual_seed(0)
        loader = DataLoader(Ragged(), 8, collate_fn=padded, **settings)
        return [batch.shape[1] for batch in loader]

    real, plain = widths(shuffle=True), widths()
    with SimulatedGPU():
        assert widths(shuffle=True) == real != plain == widths()
        assert widths(shuffle=True, num_workers=2, pin_memory=True) == real


def test_splits_and_samplers_draw_what_they_draw_without_a_card():
    def drawn():
        torch.manual_seed(0)
        one, two = random_split(Ragged(), [24, 8])
        weighted = WeightedRandomSampler([0.1, 0.9, 0.5], 6)
        return [len(row) for row in one], two.indices, list(weighted), torch.randperm(6).tolist()

    real = drawn()
    with SimulatedGPU():
        assert drawn() == real


# ---------------------------------------------------------------------- gradients


def test_clipping_and_the_search_for_anomalies_go_on(gpu):
    model, _, loss = small()
    with torch.autograd.detect_anomaly(check_nan=True):
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert norm.item() == 1.0 and norm.is_cuda


@pytest.mark.parametrize(
    "name", ["Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"]
)
def test_every_optimizer_steps(gpu, name):
    model, _, loss = small()
    optimizer = getattr(torch.optim, name)(model.parameters())
    loss.backward()
    for _ in range(2):
        optimizer.step()
    assert gpu.footprint.timeline.levels["optimizer_states"][-1] >= sum(
        parameter.nbytes for parameter in model.parameters()
    )


# ---------------------------------------------------------------------- places


def test_a_thread_of_the_readers_own_trains_on_the_card(gpu):
    held = []

    def work():
        model, optimizer, loss = small()
        loss.backward()
        optimizer.step()
        torch.tensor([1, 2], device="cuda")
        held.append(allocated())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert held[0] > 4 * 4 * 64 * 64


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Embedding, (4, 5)), (nn.EmbeddingBag, (4, 5))], ids=["one", "bag"]
)
def test_sparse_gradients_are_refused_with_the_way_out(gpu, layer, shape):
    table = layer(100, 8, sparse=True).cuda()
    with refused("sparse=False", kind=NotSimulated):
        table(torch.randint(100, shape, device="cuda")).sum().backward()


def test_a_triton_kernel_writes_into_what_is_there(gpu):
    triton = pytest.importorskip("triton")  # comes with PyTorch's builds for CUDA
    kernel = triton.jit(_some_kernel)
    x = torch.ones(1024, device="cuda")
    before = allocated()
    kernel[(4,)](x, 1024, BLOCK=256)
    assert allocated() == before
    assert any("Triton" in line for line in gpu.footprint.assumptions)


def _some_kernel(x, n, BLOCK):
    raise AssertionError("compiled for a card that is not there")
