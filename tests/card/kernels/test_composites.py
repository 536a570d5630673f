"""What C++ makes on the way to a result, against PyTorch's profiler on this machine's CPU.

The operators compared are those whose C++ is the same for both devices.
"""

import pytest
import torch
from helpers import allocated
from torch.nn import functional as F

from memlab import SimulatedGPU

N = 64 * 1000
SMALL = 8 * 64  # bytes: numbers of a row that are made on the way are left out


def profiled(function, *arguments) -> tuple[int, int]:
    """(bytes at the worst, bytes afterwards) that a function takes on the CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = function(*arguments)
    level = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    del result
    return peak, level


def simulated(function, *arguments) -> tuple[int, int]:
    """The same on a card, by tensors' own bytes."""
    with SimulatedGPU() as gpu:
        arguments = [x.detach().cuda().requires_grad_(x.requires_grad) for x in arguments]
        start = len(gpu.tracer)
        result = function(*arguments)
        level = peak = 0
        for entry in gpu.tracer.entries[start:]:
            level += entry.change
            peak = max(peak, level)
    del result
    return peak, level


FORWARD = {
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "logsumexp of each row": lambda x, y: torch.stack([row.logsumexp(-1) for row in x]),
    "one_hot": lambda x, y: F.one_hot(torch.arange(64, device=x.device), 1000),
    "isinf": lambda x, y: torch.isinf(x),
    "isfinite": lambda x, y: torch.isfinite(x),
    "dist": torch.dist,
    "cdist": torch.cdist,
    "mse": F.mse_loss,
    "mse, no reduction": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth L1": F.smooth_l1_loss,
    "L1": F.l1_loss,
    "huber": F.huber_loss,
    "soft margin": F.soft_margin_loss,
    "norm": lambda x, y: x.norm(dim=-1),
    "var": lambda x, y: x.var(-1),
    "std": lambda x, y: x.std(-1),
    "log_softmax": lambda x, y: x.log_softmax(-1),
    "softplus": lambda x, y: F.softplus(x),
    "logcumsumexp": lambda x, y: x.logcumsumexp(-1),
    "cross entropy": lambda x, y: F.cross_entropy(x, torch.zeros(64, dtype=int, device=x.device)),
    "cosine": F.cosine_similarity,
    "normalize": lambda x, y: F.normalize(x),
}


@pytest.mark.parametrize("name", FORWARD)
def test_a_result_takes_on_the_way_what_the_profiler_sees(name):
    x, y = torch.randn(64, 1000), torch.rand(64, 1000)
    real, left = profiled(FORWARD[name], x, y)
    peak, held = simulated(FORWARD[name], x, y)
    assert peak == pytest.approx(real, abs=SMALL)
    assert held == pytest.approx(left, abs=SMALL)


INDEXED = {
    "gather": lambda x: x.gather(1, torch.zeros(64, 1, dtype=int, device=x.device)),
    "log probabilities": lambda x: (
        x.gather(1, torch.zeros(64, 1, dtype=int, device=x.device)) - x.logsumexp(-1, True)
    ),
    "index": lambda x: x[torch.arange(4, device=x.device)],
    "index_select": lambda x: x.index_select(1, torch.arange(4, device=x.device)),
    "take": lambda x: x.take(torch.arange(4, device=x.device)),
    "max": lambda x: x.max(1)[0],
    "topk": lambda x: x.topk(4)[0],
    "sort": lambda x: x.cummax(1)[0],
    "mse": lambda x: F.mse_loss(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", INDEXED)
def test_derivatives_of_indexing_fill_zeros_in_place(name):
    def step(x):
        INDEXED[name](x).sum().backward()
        return x.grad

    x = torch.randn(64, 1000, requires_grad=True)
    real, _ = profiled(step, x)
    x.grad = None
    assert simulated(step, x)[0] == pytest.approx(real, abs=4 * SMALL)


def test_what_a_derivative_of_the_reader_makes_is_its_own():
    class Pick(torch.autograd.Function):
        @staticmethod
        def forward(context, x, index):
            context.save_for_backward(index)
            return x.gather(1, index)

        @staticmethod
        def backward(context, gradient):
            zeros = torch.zeros(64, 1000, device=gradient.device)
            return zeros.scatter_add(1, *context.saved_tensors, gradient), None

    def step(x):
        Pick.apply(x, torch.zeros(64, 1, dtype=int, device=x.device)).sum().backward()
        return x.grad

    assert simulated(step, torch.randn(64, 1000, requires_grad=True))[0] >= 2 * 4 * N


def test_losses_of_probabilities_take_what_their_sources_say():
    """A CPU has a buffer for the sigmoid beside."""
    x, y = torch.randn(64, 1000), torch.rand(64, 1000)
    peak, held = simulated(F.binary_cross_entropy_with_logits, x, y)
    assert (peak, held) == (8 * N + 4, 4)
    peak, held = simulated(F.binary_cross_entropy, y, y)
    assert peak == held == 4 * N + 4


def test_masked_scatter_and_sampling_take_what_their_sources_say(gpu):
    texts = torch.randn(2, 300, 64, device="cuda", dtype=torch.bfloat16)
    images = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(2, 300, 1, dtype=torch.bool, device="cuda").expand_as(texts)
    held = allocated()
    texts.masked_scatter_(mask, images)
    assert torch.cuda.max_memory_allocated() - held == 8 * texts.numel()
    torch.cuda.reset_peak_memory_stats()
    chances = torch.rand(4, 32_000, device="cuda")
    held = allocated()
    tokens = torch.multinomial(chances, 1)
    assert torch.cuda.max_memory_allocated() - held == chances.nbytes + 512
    assert tokens.shape == (4, 1)
