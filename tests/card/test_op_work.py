"""What an operator of a step does: operations, bytes, kernels."""

import pytest
import torch

from memlab import SimulatedGPU
from memlab.card.op_work import WorkLog
from memlab.footprint import Phase
from memlab.trace.work import (
    Work,
    count_kernels,
    count_tiles,
    repeat_micro_batch,
)

fp16 = torch.float16


@pytest.fixture
def card():
    """The card on which a test's tensors lie."""
    with SimulatedGPU("A100-40GB") as gpu, torch.device("cuda"):
        yield gpu


def work(card, run):
    """The work of what `run` does: a list of Work."""
    before = card.work.of_step.copy()
    run()
    return list((card.work.of_step - before).elements())


def test_a_product_reads_both_and_writes_one(card):
    a = torch.empty(256, 512, dtype=fp16)
    b = torch.empty(512, 1024, dtype=fp16)
    (one,) = work(card, lambda: a @ b)
    assert one.flops == 2 * 256 * 512 * 1024 and one.dtype == "float16"
    assert one.nbytes == 2 * (256 * 512 + 512 * 1024 + 256 * 1024)
    assert count_tiles([one.result], [one.dtype]) == [2 * 8] and one.lists == 0


def test_a_product_into_a_given_tensor_of_another_dtype_counts(card):
    a = torch.empty(64, 64, dtype=fp16)
    total = torch.zeros(64, 64)
    ops = torch.ops.aten
    (one,) = work(card, lambda: ops.mm.out(a, a, out=torch.empty_like(a)))
    assert one.flops == 2 * 64**3 and one.nbytes == 3 * a.nbytes
    if torch.__version__ >= "2.12":
        (one,) = work(card, lambda: ops.addmm.dtype(total, a, a, torch.float32))
        assert one.flops == 2 * 64**3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_of_groups_is_as_many_operations_as_its_rows_have_each_with_one(card, dtype):
    """Experts: 96 rows, each multiplied by the matrix of one of 4 groups."""
    rows = torch.empty(96, 32, dtype=dtype, requires_grad=True)
    experts = torch.empty(4, 32, 64, dtype=dtype, requires_grad=True)
    ends = torch.tensor([24, 24, 64, 96], dtype=torch.int32)
    grouped = torch.nn.functional.grouped_mm
    done = work(card, lambda: grouped(rows, experts, offs=ends).square().sum().backward())
    products = [one for one in done if one.flops]
    assert [one.flops for one in products] == 3 * [2 * 96 * 32 * 64]
    assert {one.dtype for one in products} == {str(dtype).removeprefix("torch.")}


def test_a_complex_product_is_four_real_ones(card):
    a = torch.empty(64, 64, dtype=torch.complex64)
    (one,) = work(card, lambda: a @ a)
    assert one.flops == 4 * 2 * 64**3 and one.dtype == "float32"


def test_views_and_memory_cost_nothing(card):
    a = torch.empty(64, 64)
    assert work(card, lambda: (a.t(), a.view(-1), a[3:], a.expand(2, 64, 64), a.detach())) == []
    assert work(card, lambda: torch.empty_like(a)) == []


@pytest.mark.parametrize(
    "run, moved",
    [
        (lambda a: a + a, 3),  # two are read, one is written
        (lambda a: a.add_(1), 2),
        (lambda a: a.zero_(), 1),
        (lambda a: a.copy_(a), 2),
        (lambda a: a.half(), 1.5),
    ],
    ids="add add_ zero_ copy_ half".split(),
)
def test_bytes_are_those_that_are_read_and_written(card, run, moved):
    a = torch.empty(1024, 1024)
    assert sum(one.nbytes for one in work(card, lambda: run(a))) == moved * a.nbytes


def test_what_is_repeated_is_read_once(card):
    row = torch.empty(1, 1024)
    a = torch.empty(1024, 1024)
    (one,) = work(card, lambda: a + row.expand(1024, 1024))
    assert one.nbytes == 2 * a.nbytes + row.nbytes


def test_an_embedding_reads_its_rows_and_not_its_table(card):
    table = torch.empty(100_000, 64)
    tokens = torch.zeros(4, 8, dtype=torch.long)
    (one,) = work(card, lambda: torch.nn.functional.embedding(tokens, table))
    assert one.nbytes == 2 * 4 * 8 * 64 * 4 + tokens.nbytes


def test_fused_attention_moves_no_matrix_and_skips_what_is_masked(card):
    q = torch.empty(2, 8, 1024, 64, dtype=fp16)
    attend = torch.nn.functional.scaled_dot_product_attention
    (whole,) = work(card, lambda: attend(q, q, q))
    (causal,) = work(card, lambda: attend(q, q, q, is_causal=True))
    assert whole.flops == 2 * 2 * 2 * 8 * 1024 * 1024 * 64 == 2 * causal.flops
    assert whole.nbytes < 2 * 8 * 1024 * 1024 * 2  # one matrix of scores


def test_heads_that_share_keys_have_products_of_their_own(card):
    q = torch.empty(2, 8, 256, 64, dtype=fp16, requires_grad=True)
    k = torch.empty(2, 2, 256, 64, dtype=fp16, requires_grad=True)

    def attend(key, **how):
        found = []
        attention = torch.nn.functional.scaled_dot_product_attention
        found += work(card, lambda: attention(q, key, key, **how).sum().backward())
        return sum(one.flops for one in found)

    assert attend(k, enable_gqa=True) == attend(k.detach().repeat(1, 4, 1, 1).requires_grad_())
    assert attend(k, enable_gqa=True) == 2 * 7 * 2 * 8 * 256 * 256 * 64


@pytest.mark.parametrize("kind, passes", [({"fused": True}, 7), ({"foreach": True}, None)])
def test_an_optimizer_of_lists_launches_few_kernels(card, kind, passes):
    weights = [torch.nn.Parameter(torch.empty(1000, 1000)) for _ in range(20)]
    optimizer = torch.optim.AdamW(weights, **kind)

    def step():
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()

    step()
    step()  # the states are there
    done = [one for one in card.work.of_step.elements() if one.phase == Phase.STEP]
    launched = count_kernels([one.lists for one in done], [one.elements for one in done])
    assert launched.sum() < 20
    moved = sum(one.nbytes for one in done) / (20 * 4_000_000)
    if passes:
        assert moved == pytest.approx(passes, rel=0.01)
    else:
        assert moved > 7  # one pass over memory for each of its operations


def test_a_forward_pass_that_is_repeated_is_told_apart(card):
    one, other = (torch.nn.Linear(64, 64) for _ in range(2))
    layers = torch.nn.Sequential(one, torch.nn.Tanh(), other)
    x = torch.empty(8, 64, requires_grad=True)

    def step():
        checkpoint = torch.utils.checkpoint.checkpoint
        checkpoint(layers, x, use_reentrant=False).sum().backward()

    done = work(card, step)
    products = [one for one in done if one.flops]
    # Two forward, four backward, and the first again; the other's result is not needed.
    assert [one.recomputed for one in products].count(True) == 1 and len(products) == 7


def test_the_step_is_the_last_whole_one_and_its_second_micro_batch_can_be_repeated(t4):
    model = torch.nn.Linear(64, 64).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.empty(8, 64, device="cuda")

    def step(times):
        for _ in range(times):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    step(2)
    two = t4.work.of_step
    step(5)
    five = t4.work.of_step
    model(x)  # of a step that has not ended
    assert t4.work.of_step == five

    def flops(work):
        return sum(one.flops * n for one, n in work.items())

    assert flops(five) == 5 * flops(two) / 2
    assert flops(repeat_micro_batch(two, 4)) == flops(five)
    stepping = [one for one in two if one.phase == Phase.STEP]
    again = repeat_micro_batch(two, 4)
    assert stepping and all(again[one] == two[one] for one in stepping)


def test_two_optimizers_of_one_backward_pass_make_one_step(card):
    weights = [torch.nn.Parameter(torch.ones(256, 256)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    for _ in range(2):
        (weights[0] @ weights[1]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    of_step = card.work.of_step
    assert sum(one.flops * n for one, n in of_step.items()) == 3 * 2 * 256**3
    assert sum(n for one, n in of_step.items() if one.phase == Phase.STEP) >= 2


def test_two_optimizers_make_one_step_without_a_backward_pass_too(card):
    weights = [torch.nn.Parameter(torch.ones(size, size)) for size in (256, 512)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizers = [torch.optim.SGD([weight], lr=0.1, foreach=False) for weight in weights]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
    moved = sorted(one.nbytes for one in card.work.of_step.elements())
    assert len(moved) == 2 and moved[1] == 4 * moved[0]


def test_optimizers_without_a_backward_pass_have_a_step_each(card):
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.nn.Parameter(torch.ones(256, 256, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.step()
        optimizer.step()
    moved = [one.nbytes for one in card.work.of_step.elements()]
    assert sum(moved) == 3 * 256 * 256 * 4  # of the last step alone, in fp32


class Stepper:
    """In place of an optimizer."""


def test_an_optimizer_is_another_one_even_at_the_address_of_one_that_is_gone():
    log = WorkLog()
    for _ in range(2):
        log.add(Work(phase=Phase.STEP))
        log.end_step(Stepper())
    assert log.of_step.total() == 2
