"""Chapter 11: its schedule keeps PyTorch's rules, its loaders and stores do what it says."""

import itertools
import random

import datasets
import pytest
import torch
from accelerate import Accelerator
from notebook import Notebook
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

FORK = {"multiprocessing_context": "fork"}


@pytest.fixture(scope="module")
def page():
    chapter = Notebook("11-dataloader")
    namespace = chapter.run(
        "imports settings schedule changed texts store chance-wrong chance-fixed"
    )
    ids = torch.arange(64 * 64).reshape(64, 64) % 1024
    return namespace | {"ids": ids, "tokenizer": range(1024)}


@pytest.mark.parametrize("workers, prefetch", itertools.product((1, 2, 3, 4, 8), (1, 2, 4)))
@pytest.mark.parametrize("load", [0.3, 1, 3, 8])
def test_in_the_long_run_a_step_takes_what_the_slower_side_takes(page, load, workers, prefetch):
    plan = page["schedule"]([load] * 400, workers, prefetch)
    step = (plan[-1][3] - plan[200][3]) / 199
    if prefetch > 1:  # else a worker idles until its only batch is taken
        assert step == pytest.approx(max(1, load / workers), rel=0.03)
    assert step >= max(1, load / workers) * 0.97


def test_a_schedule_keeps_the_rules_of_the_loader(page):
    loads = [1 + (7 * n) % 5 for n in range(60)]
    for workers, prefetch in itertools.product((1, 2, 4), (1, 2, 3)):
        plan = page["schedule"](loads, workers, prefetch, compute=1.5)
        for n, (begin, end, delivered, done) in enumerate(plan):
            assert end == begin + loads[n] and delivered >= end and done == delivered + 1.5
            if n:
                assert delivered >= plan[n - 1][3]
            if n >= workers:
                assert begin >= plan[n - workers][1]
            if n >= workers * prefetch:
                assert begin >= plan[n - workers * prefetch][2]


def test_without_workers_loading_and_computing_take_turns(page):
    assert page["schedule"]([2, 3, 4], 0) == [(0, 2, 2, 3), (3, 6, 6, 7), (7, 11, 11, 12)]
    assert page["idle"]([2, 2, 2], 0) == pytest.approx(4 / 7)  # after the first batch


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_no_schedule_beats_the_formula(page, workers, prefetch):
    """Loading and computing take at least max(C, L/w) a step; without workers exactly L + C."""
    draw = random.Random(0)
    for compute in (0.5, 1.0, 3.0):
        loads = [draw.choice([0.2, 1.0, 10.0]) for _ in range(60)]
        took = page["schedule"](loads, workers, prefetch, compute)[-1][3]
        work, bound = sum(loads), 60 * compute
        if workers:
            assert took >= max(bound, work / workers) - 1e-9
        else:
            assert took == pytest.approx(work + bound)


def test_uneven_batches_have_the_mean(page):
    for slow in (1, 5, 20):
        loads = page["uneven"](1.9, slow)
        assert sum(loads) / len(loads) == pytest.approx(1.9)
        assert max(loads) == pytest.approx(slow * min(loads))


class Counting(SequentialSampler):
    asked = 0

    def __iter__(self):
        for i in super().__iter__():
            self.asked += 1
            yield i


@pytest.mark.parametrize("workers, prefetch", [(0, None), (1, 1), (2, 2), (2, 3)])
def test_so_many_batches_are_under_way_as_the_text_says(workers, prefetch):
    sampler = Counting(range(128))
    how = dict(num_workers=workers, prefetch_factor=prefetch) | (FORK if workers else {})
    next(iter(DataLoader(range(128), batch_size=8, sampler=sampler, **how)))
    assert sampler.asked // 8 == 1 + workers * (prefetch or 0)


@pytest.mark.parametrize("kind", ["Texts", "MaskedByIndex"])
def test_workers_change_neither_order_nor_samples(page, kind):
    data = page[kind](page["ids"][:16])
    orders = []
    for seed in (0, 1, 2):
        alone, three = (
            torch.cat([batch["input_ids"] for batch in page["load"](data, workers, seed)])
            for workers in (0, 3)
        )
        assert torch.equal(alone, three)
        orders.append(alone.tolist())
    assert orders[0] != orders[1] != orders[2]


def test_the_packed_store_gives_the_strings(page):
    strings = ["", "one", "zwölf \N{SNOWMAN}", "x" * 5000]
    store = page["Packed"](strings)
    assert [store[i] for i in range(4)] == strings


def test_tiles_and_waves_are_counted():
    used = Notebook("11-dataloader-deeper").run("imports tiles-used")["used"]
    assert used(128 * 40, 128, "T4") == 1  # one whole wave of 40 multiprocessors
    assert used(128 * 41, 128, "T4") == pytest.approx(41 / 80)
    assert used(128 * 40, 129, "T4") == pytest.approx(129 / 256)
    assert all(0 < used(8 * n, 100, "A100-80GB") <= 1 for n in range(1, 99))


def test_accelerate_gives_every_sample_in_the_same_order(page):
    loader, alike = (page["load"](page["Texts"](page["ids"][:24]), 2) for _ in range(2))
    prepared = Accelerator(cpu=True).prepare(alike)
    assert prepared.num_workers == 2
    ours, theirs = (torch.cat([batch["input_ids"] for batch in x]) for x in (loader, prepared))
    assert torch.equal(ours, theirs) and ours.shape == (24, 64)


def test_a_stream_of_datasets_comes_once_and_a_torch_one_for_each_worker():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    ours = sorted(int(x) for batch in DataLoader(Stream(), 2, num_workers=2) for x in batch)
    assert ours == sorted(2 * list(range(4)))
    theirs = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)
    seen = [int(x) for batch in DataLoader(theirs, 2, num_workers=2) for x in batch["x"]]
    assert sorted(seen) == list(range(8))
