"""The panel of padding counts what the chapter's own strategies make, in a real browser."""

import json
import math
import random

import pytest
from notebook import Notebook

from memlab.panels.padding import PaddingExplorer

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

LENGTHS = [random.Random(i).randrange(1, 700) for i in range(300)]
MEMORY = {"least": 2**30, "fixed": 2**29, "token": 2**18, "pair": 2**8, "room": 2**32}
MEMORY |= {"what": "a model on <b>a card</b>"}
NAMES = ["one", "two <b> & 'three' &amp;", "</script><!--<script>"]
GIVEN = dict(zip(NAMES, (LENGTHS, [5, 5, 5, 10], [3]), strict=True))
KIND = ".memlab-padding"


@pytest.fixture(scope="module")
def chapter():
    cells = "imports orders grouped packed budget"
    return Notebook("10-padding").run(cells, {"counts": [5], "survived": lambda plan: ""})


@pytest.fixture
def page(open_once):
    return open_once(PaddingExplorer(GIVEN, MEMORY), kind=KIND)


def count(page, size, limit, budget=4096):
    return page.run(f"panel.memlabCount({json.dumps(LENGTHS)}, {size}, {limit}, {budget})")


def shown(page):
    """Strategy -> [tokens, widest batch, peak] of the rows that a reader sees."""
    values = "Number(r.dataset.tokens), r.dataset.widest.split(',').map(Number)"
    rows = "[...panel.querySelectorAll('tbody tr[data-name]')]"
    return dict(page.run(f"{rows}.map(r => [r.dataset.name, [{values}, Number(r.dataset.peak)]])"))


@pytest.mark.parametrize("size, limit", [(1, 512), (8, 512), (16, 128), (512, 1000)])
def test_it_counts_what_the_chapter_makes(page, chapter, size, limit):
    cut = [min(n, limit) for n in LENGTHS]
    found = count(page, size, limit)
    assert found["needed"] == sum(cut)
    assert found["fixed"] == {"tokens": len(cut) * limit, "widest": [min(size, 300), limit]}
    rows = len(chapter["packed"](cut, limit))
    together = min(rows, max(1, math.floor(size * rows / len(cut) + 0.5)))
    assert found["packed"] == {"tokens": rows * limit, "widest": [together, limit]}
    plans = {"sorted": ("by_length", size), "budget": ("token_budget", 4096)}
    plans |= {"dynamic": ("shuffled", size), "grouped": ("grouped", size)}
    tokens = {}
    for name, (strategy, given) in plans.items():
        batches = [(len(b), max(cut[i] for i in b)) for b in chapter[strategy](cut, given)]
        tokens[name] = sum(n * width for n, width in batches)
        if name in ("sorted", "budget"):  # the others are by chance
            n, width = found[name]["widest"]
            assert n * width == max(n * width for n, width in batches)
            assert found[name]["tokens"] == tokens[name]
    assert found["dynamic"]["tokens"] == pytest.approx(tokens["dynamic"], rel=0.06)
    order = [found[name]["tokens"] for name in ("sorted", "grouped", "dynamic", "fixed")]
    assert order == sorted(order)


def test_the_fields_change_what_is_shown_and_a_batchs_peak_is_of_its_widest(page):
    found = count(page, 16, 512)
    assert {name: row[:2] for name, row in shown(page).items()} == {
        name: [row["tokens"], row["widest"]] for name, row in found.items() if name != "needed"
    }
    page.set(".limit", "700")
    page.set(".size", "5")
    peaks = [peak for _, _, peak in shown(page).values()]
    assert peaks == [
        max(2**30, 2**29 + n * width * (2**18 + width * 2**8))
        for _, (n, width), _ in shown(page).values()
    ]
    over = page.run("[...panel.querySelectorAll('td.over')].map(x => x.textContent)")
    assert over == [f"{peak / 2**30:.1f} GiB" for peak in peaks if peak > 2**32] != []
    assert "a model on <b>a card</b>" in page.said()
    typed = {".own": "10, 2 3; 4", ".size": "1", ".limit": "10", ".budget": "12"}
    for field, value in typed.items():
        page.set(field, value)
    assert shown(page)["sorted"][:2] == [2 * 3 + 2 * 10, [2, 10]]
    assert shown(page)["budget"][:2] == [10 + 3 * 4, [3, 4]]
    right = "[...panel.querySelectorAll('td, span')].map(x => x.getBoundingClientRect().right)"
    assert max(page.run(right)) <= 390


def test_without_memory_there_is_no_peak(open_once):
    panel = open_once(PaddingExplorer({"one": LENGTHS}), kind=KIND)
    assert "peak" not in panel.run("panel.innerText").lower() and len(shown(panel)) == 6


@pytest.mark.parametrize(
    "field, value, says",
    [
        (".own", "10 twenty", "“twenty” is no length"),
        (".own", "0", "whole numbers from 1"),
        (".own", "1 " * 20001, "20000 at most"),
        (".limit", "0", "the fixed length is 0"),
        (".limit", "", "the fixed length is empty"),
        (".budget", "511", "the budget is 511: allowed are whole numbers from 512"),
    ],
)
def test_bad_input_is_told_in_a_line(page, field, value, says):
    page.set(field, value)
    assert says in page.said() and shown(page) == {}


@pytest.mark.parametrize(
    "given, says",
    [
        ([{}], "lengths is empty"),
        ([{"a": []}], "is empty"),
        ([{"a": [3, 0]}], "holds 0"),
        ([{"a": [1]}, {"peak": 1}], "memory has the keys peak: allowed are least, fixed"),
    ],
)
def test_bad_lengths_raise(given, says):
    with pytest.raises(ValueError, match=says):
        PaddingExplorer(*given)


def test_a_name_is_no_markup_and_finds_its_lengths(page):
    for name, lengths in GIVEN.items():
        page.set(".which", name)
        assert shown(page)["fixed"][0] == 512 * len(lengths)
        assert f" {len(lengths)} texts" in page.said()
