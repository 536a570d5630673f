"""Chapter 11: its schedule keeps PyTorch's rules, its loaders and stores do what it says."""

import itertools

import pytest
import torch
from notebook import Notebook


@pytest.fixture(scope="module")
def page():
    chapter = Notebook("11-dataloader")
    namespace = chapter.run(
        "imports settings schedule changed texts store chance-wrong chance-fixed"
    )
    ids = torch.arange(64 * 64).reshape(64, 64) % 1024
    return namespace | {"ids": ids, "tokenizer": range(1024)}


@pytest.mark.parametrize("workers, prefetch", itertools.product((0, 1, 2, 4), (1, 2, 3)))
def test_a_schedule_keeps_the_rules_of_the_loader(page, workers, prefetch):
    """A worker begins once it is free and asked; a step, once it has its batch and is free."""
    loads = [1 + (7 * n) % 5 for n in range(60)]
    plan = page["schedule"](loads, workers, prefetch, compute=1.5)
    for n, (begin, end, start, done) in enumerate(plan):
        before = plan[n - 1][3] if n else 0
        free = plan[n - workers][1] if n >= workers > 0 else 0
        asked = plan[n - workers * prefetch][2] if n >= workers * prefetch > 0 else 0
        wanted = max(free, asked) if workers else before  # without workers they take turns
        assert (begin, end, done) == (wanted, begin + loads[n], start + 1.5)
        assert start == max(end, before)
    waited = sum(plan[n][2] - plan[n - 1][3] for n in range(1, 60))
    assert page["idle"](loads, workers, prefetch, 1.5) == pytest.approx(
        waited / (plan[-1][3] - plan[0][2])
    )


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
