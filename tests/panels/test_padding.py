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


@pytest.fixture(scope="module")
def chapter():
    cells = "imports orders grouped packed budget"
    return Notebook("10-padding").run(cells, {"counts": [5], "survived": lambda plan: ""})


@pytest.fixture
def page(open_once):
    return open_once(PaddingExplorer(GIVEN, MEMORY))


def count(page, size, limit, budget=4096):
    return page.run(f"panel.count({json.dumps(LENGTHS)}, {size}, {limit}, {budget})")


def shown(page):
    """Strategy -> [tokens, widest batch, peak] of the rows that a reader sees."""
    values = "Number(r.dataset.tokens), r.dataset.widest.split(',').map(Number)"
    rows = "[...panel.querySelectorAll('tbody tr[data-name]')]"
    return dict(page.run(f"{rows}.map(r => [r.dataset.name, [{values}, Number(r.dataset.peak)]])"))


@pytest.mark.parametrize("size, limit", [(1, 512), (8, 512), (16, 128), (512, 1000)])
def test_it_counts_what_the_chapter_makes(page, chapter, size, limit):
    cut = [min(n, limit) for n in LENGTHS]
    found = count(page, size, limit)
    assert found.pop("needed") == sum(cut)
    rows = len(chapter["packed"](cut, limit))
    wanted = {"fixed": len(cut) * limit, "packed": rows * limit}
    plans = {"sorted": ("by_length", size), "budget": ("token_budget", 4096)}
    plans |= {"dynamic": ("shuffled", size), "grouped": ("grouped", size)}
    for name, (strategy, given) in plans.items():
        batches = [len(b) * max(cut[i] for i in b) for b in chapter[strategy](cut, given)]
        wanted[name] = sum(batches)
        if name in ("sorted", "budget"):
            assert math.prod(found[name]["widest"]) == max(batches)
    for name, tokens in wanted.items():
        by_chance = 0.06 if name in ("dynamic", "grouped") else 0
        assert found[name]["tokens"] == pytest.approx(tokens, rel=by_chance), name


def test_a_batchs_peak_is_of_its_widest_and_what_is_too_high_is_marked(page):
    page.put(limit=700, size=5)
    peaks = []
    for _, (n, width), peak in shown(page).values():
        assert peak == max(2**30, 2**29 + n * width * (2**18 + width * 2**8))
        peaks.append(peak)
    over = page.run("[...panel.querySelectorAll('td.over')].map(x => x.textContent)")
    assert over == [f"{peak / 2**30:.1f} GiB" for peak in peaks if peak > 2**32] != []
    assert "a model on <b>a card</b>" in page.said()


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("own", "10 twenty", "“twenty” is no length"),
        ("own", "0", "whole numbers from 1"),
        ("own", "1 " * 20001, "20000 at most"),
        ("limit", "", "the fixed length is empty"),
        ("budget", "511", "the budget is 511: allowed are whole numbers from 512"),
    ],
)
def test_bad_input_is_told_in_a_line(page, field, value, says):
    page.set(field, value)
    assert says in page.said() and shown(page) == {}


def test_a_name_is_no_markup_and_finds_its_lengths(page):
    for name, lengths in GIVEN.items():
        page.set("corpus", name)
        assert shown(page)["fixed"][0] == 512 * len(lengths)
        assert f" {len(lengths)} texts" in page.said()
