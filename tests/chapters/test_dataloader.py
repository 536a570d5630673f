"""Chapter 11: its loaders do what it says they do, and its schedule keeps PyTorch's rules."""

import itertools
import os
import random

import datasets
import pytest
import torch
from accelerate import Accelerator
from notebook import Notebook
from torch.utils.data import DataLoader

import memlab
from memlab.book.chapters import dataloader
from memlab.book.chapters.dataloader import Texts
from memlab.book.chapters.loading import schedule

CHAPTER = Notebook("11-dataloader")


@pytest.fixture(scope="module")
def loading():
    """The loader, and texts that cost nothing to load."""
    namespace = CHAPTER.run("imports changed store", {"memlab": memlab})
    return namespace | {"ids": torch.arange(64 * 64).reshape(64, 64) % 1024}


@pytest.mark.parametrize("workers, prefetch", itertools.product((1, 2, 3, 4, 8), (1, 2, 4)))
@pytest.mark.parametrize("load", [0.3, 1, 3, 8])
def test_in_the_long_run_a_step_takes_what_the_slower_side_takes(load, workers, prefetch):
    plan = schedule([load] * 400, 1, workers, prefetch)
    step = (plan[-1][3] - plan[200][3]) / 199
    if prefetch > 1:  # else a worker idles until its only batch is taken
        assert step == pytest.approx(max(1, load / workers), rel=0.03)
    assert step >= max(1, load / workers) * 0.97


def test_a_schedule_keeps_the_rules_of_the_loader():
    loads = [1 + (7 * n) % 5 for n in range(60)]
    for workers, prefetch in itertools.product((1, 2, 4), (1, 2, 3)):
        plan = schedule(loads, 1.5, workers, prefetch)
        for n, (begin, end, delivered, done) in enumerate(plan):
            assert end == begin + loads[n] and delivered >= end and done == delivered + 1.5
            if n:
                assert delivered >= plan[n - 1][3]
            if n >= workers:
                assert begin >= plan[n - workers][1]
            if n >= workers * prefetch:
                assert begin >= plan[n - workers * prefetch][2]


def test_without_workers_loading_and_computing_take_turns():
    plan = schedule([2, 3, 4], 1, 0)
    assert plan == [(0, 2, 2, 3), (3, 6, 6, 7), (7, 11, 11, 12)]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_is_loaded_once_and_by_whom_it_says(loading, workers):
    loader = loading["load"](Texts(loading["ids"][:24]), workers)
    losses, seen, events = dataloader.train(loader, *dataloader.reader("cpu"))
    assert len(losses) == 3 and sorted(seen) == list(range(24))
    loads = [event for event in events if event[0] == "load"]
    who = {event[1] for event in loads}
    assert len(loads) == 24 and len(who) == max(1, workers)
    assert (os.getpid() in who) == (workers == 0)
    assert all(begin <= end for _, _, begin, end in events)
    assert 0 <= dataloader.idle(events) < 1


def test_workers_change_neither_order_nor_losses(loading):
    data, orders = Texts(loading["ids"][:16]), []
    for seed in (0, 1, 2):
        none, three = (
            dataloader.train(loading["load"](data, n, seed), *dataloader.reader("cpu", seed))[:2]
            for n in (0, 3)
        )
        assert none == three  # to the last bit
        orders.append(none[1])
    assert orders[0] != orders[1] != orders[2]


class Counting(torch.utils.data.SequentialSampler):
    asked = 0

    def __iter__(self):
        for i in super().__iter__():
            self.asked += 1
            yield i


@pytest.mark.parametrize("workers, prefetch", [(0, None), (1, 1), (2, 2), (2, 3)])
def test_so_many_batches_are_under_way_as_the_text_says(workers, prefetch):
    sampler = Counting(range(128))
    how = dict(num_workers=workers, prefetch_factor=prefetch)
    how |= dataloader.FORK if workers else {}
    next(iter(DataLoader(range(128), batch_size=8, sampler=sampler, **how)))
    assert sampler.asked // 8 == 1 + workers * (prefetch or 0)


@pytest.mark.parametrize("more", [{}, {"persistent_workers": True}])
def test_persistent_workers_stay(loading, more):
    loader = loading["load"](Texts(loading["ids"]), 2, **more)
    first, second = ({int(p) for b in loader for p in b["span"][:, 0]} for _ in range(2))
    assert (first == second) if more else not first & second


def test_the_packed_store_gives_the_strings(loading):
    strings = ["", "one", "zwölf \N{SNOWMAN}", "x" * 5000]
    store = loading["Packed"](strings)
    assert [store[i] for i in range(4)] == strings


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, shared_out):
        self.shared_out = shared_out

    def __iter__(self):
        me = torch.utils.data.get_worker_info()
        return iter(range(me.id, 6, me.num_workers) if self.shared_out else range(6))


def test_what_only_a_gpu_measures_makes_its_table():
    """The tables from clocks that stand in for a card's."""
    if not torch.cuda.is_available():
        cpu = torch.device("cpu")
        assert dataloader.bandwidth(2**10, pin=False, device=cpu, times=1) > 0
        assert dataloader.gemm_seconds(8, cpu, times=1) > 0
    pins = []

    def clock(nbytes, pin, device):
        pins.append(pin)
        return 24.0 if pin else 8.0

    table = dataloader.copies({"text": 2**10, "images": 2**20}, "cuda", clock)
    assert {type(pin) for pin in pins} == {bool}  # torch.empty takes no 0 or 1 for pin_memory
    assert list(table.columns) == ["pageable", "pinned", "pageable again"]
    assert (table["pinned"] == 24).all() and list(table.index) == ["text", "images"]
    ratios = dataloader.gemm_ratios(50257, 50304, "cuda", lambda n, device: 2.0 if n % 64 else 1.0)
    assert ratios == {"as it is": 1, "padded": 0.5, "as it is, again": 1}


def test_tiles_and_waves_are_counted():
    used = dataloader.used
    assert used(128 * 40, 128, "T4") == 1  # one whole wave of 40 multiprocessors
    assert used(128 * 41, 128, "T4") == pytest.approx(41 / 80)
    assert used(128 * 40, 129, "T4") == pytest.approx(129 / 256)
    assert all(0 < used(8 * n, 100, "A100-80GB") <= 1 for n in range(1, 99))


def test_accelerate_gives_every_sample_once(loading):
    loader = loading["load"](Texts(loading["ids"][:24]), 2)
    prepared = Accelerator(cpu=True).prepare(loader)
    assert prepared.num_workers == 2
    one, other = ([i for b in x for i in b["index"].tolist()] for x in (loader, prepared))
    assert sorted(one) == sorted(other) == list(range(24))


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_no_schedule_beats_the_formula(workers, prefetch):
    """Loading and computing take at least max(C, L/w) a step; without workers exactly L + C."""
    draw = random.Random(0)
    for compute in (0.5, 1.0, 3.0):
        loads = [draw.choice([0.2, 1.0, 10.0]) for _ in range(60)]
        took = schedule(loads, compute, workers, prefetch)[-1][3]
        work, bound = sum(loads), 60 * compute
        if workers:
            assert took >= max(bound, work / workers) - 1e-9
        else:
            assert took == pytest.approx(work + bound)


def test_a_stream_of_datasets_comes_once_and_a_torch_one_for_each_worker():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(4))

    ours = sorted(int(x) for batch in DataLoader(Stream(), 2, num_workers=2) for x in batch)
    assert ours == sorted(2 * list(range(4)))
    theirs = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)
    seen = [int(x) for batch in DataLoader(theirs, 2, num_workers=2) for x in batch["x"]]
    assert sorted(seen) == list(range(8))
