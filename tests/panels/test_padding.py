"""The panel of padding counts what Python counts, in a real browser without a network."""

import json
import math
import random

import pytest

from memlab.panels.padding import PaddingExplorer

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

LENGTHS = [random.Random(i).randrange(1, 700) for i in range(300)]
MEMORY = {"least": 2**30, "fixed": 2**29, "token": 2**18, "pair": 2**8, "room": 2**32}
MEMORY |= {"what": "a model on <b>a card</b>"}


@pytest.fixture
def page(open_panel):
    return open_panel(PaddingExplorer({"one": LENGTHS, "two <b>": [5, 5, 5, 10]}, MEMORY))


def count(tab, lengths, size, limit, budget=4096):
    call = f"({json.dumps(lengths)}, {size}, {limit}, {budget})"
    return tab.run(f"document.querySelector('.memlab-padding').memlabCount{call}")


def shapes(lengths, size):
    batches = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    return [[len(batch), max(batch)] for batch in batches]


def tokens(batches):
    return sum(rows * width for rows, width in batches)


def widest(batches):
    return max(batches, key=lambda batch: batch[0] * batch[1])


def budgeted(lengths, budget):
    batches = []
    for n in sorted(lengths, reverse=True):
        if batches and batches[-1][1] * (batches[-1][0] + 1) <= budget:
            batches[-1][0] += 1
        else:
            batches.append([1, n])
    return batches


def rows(lengths, limit):
    free = []
    for n in sorted(lengths, reverse=True):
        row = next((i for i, left in enumerate(free) if left >= n), None)
        if row is None:
            free.append(limit - n)
        else:
            free[row] -= n
    return len(free)


def set_value(tab, name, value):
    tab.run(f"""(() => {{
        const field = document.querySelector('.memlab-padding {name}');
        field.value = {json.dumps(value)};
        field.dispatchEvent(new Event('input', {{bubbles: true}}));
    }})()""")


def shown(tab):
    """Strategy -> [tokens, widest batch, peak] of the rows that a reader sees."""
    rows = "[...document.querySelectorAll('.memlab-padding tbody tr[data-name]')]"
    values = "Number(r.dataset.tokens), r.dataset.widest.split(',').map(Number)"
    found = tab.run(f"{rows}.map(r => [r.dataset.name, [{values}, Number(r.dataset.peak)]])")
    return dict(found)


@pytest.mark.parametrize("size, limit", [(1, 512), (8, 512), (16, 128), (512, 1000)])
def test_it_counts_what_python_counts(page, size, limit):
    cut = [min(n, limit) for n in LENGTHS]
    found = count(page, LENGTHS, size, limit)
    in_order = shapes(sorted(cut), size)
    assert found["needed"] == sum(cut)
    assert found["fixed"] == {"tokens": len(cut) * limit, "widest": [min(size, 300), limit]}
    assert found["sorted"] == {"tokens": tokens(in_order), "widest": widest(in_order)}
    full = rows(cut, limit)
    together = min(full, max(1, math.floor(size * full / len(cut) + 0.5)))
    assert found["packed"] == {"tokens": full * limit, "widest": [together, limit]}
    within = budgeted(cut, 4096)
    assert found["budget"] == {"tokens": tokens(within), "widest": widest(within)}
    assert max(n * w for n, w in within) <= 4096
    mixed = tokens(shapes(random.Random(0).sample(cut, len(cut)), size))
    assert found["dynamic"]["tokens"] == pytest.approx(mixed, rel=0.06)
    order = [found[name]["tokens"] for name in ("sorted", "grouped", "dynamic", "fixed")]
    assert order == sorted(order)
    for name in ("dynamic", "grouped"):
        n, w = found[name]["widest"]
        assert n <= size and w <= max(cut) and n * w <= size * max(cut)


def test_the_peak_is_that_of_the_widest_batch(page):
    for name, (_, (n, w), peak) in shown(page).items():
        linear = 2**29 + n * w * (2**18 + w * 2**8)
        assert peak == max(2**30, linear), name
    peaks = "[...document.querySelectorAll('.memlab-padding td.over')].map(x => x.textContent)"
    assert page.run(peaks) == []
    set_value(page, ".limit", "700")
    set_value(page, ".size", "5")
    too_high = [peak for _, _, peak in shown(page).values() if peak > 2**32]
    assert too_high and page.run(peaks) == [f"{peak / 2**30:.1f} GiB" for peak in too_high]
    set_value(page, ".own", "2 3")
    set_value(page, ".limit", "3")
    assert {peak for _, _, peak in shown(page).values()} == {2**30}
    said = page.run("document.querySelector('.memlab-padding .say').textContent")
    assert "a model on <b>a card</b>" in said


def test_without_memory_there_is_no_peak(open_panel):
    panel = open_panel(PaddingExplorer({"one": LENGTHS}))
    text = panel.run("document.querySelector('.memlab-padding').innerText")
    assert "GiB" not in text and "peak" not in text.lower()
    assert set(shown(panel)) == {"fixed", "dynamic", "grouped", "sorted", "budget", "packed"}


def test_bars_and_peaks_stay_on_a_phones_screen(page):
    parts = "'.memlab-padding tbody td, .memlab-padding tbody span'"
    right = f"[...document.querySelectorAll({parts})].map(x => x.getBoundingClientRect().right)"
    assert max(page.run(right)) <= 390
    assert page.run("document.querySelector('.memlab-padding .strip div').offsetWidth") > 250


def test_the_fields_change_what_is_shown(page):
    found = count(page, LENGTHS, 16, 512)
    assert found.pop("needed") == sum(min(n, 512) for n in LENGTHS)
    assert {name: row[:2] for name, row in shown(page).items()} == {
        name: [row["tokens"], row["widest"]] for name, row in found.items()
    }
    set_value(page, ".own", "10, 2 3; 4")
    set_value(page, ".size", "1")
    set_value(page, ".limit", "10")
    set_value(page, ".budget", "12")
    assert page.run("document.querySelector('.memlab-padding output').textContent") == "2"
    assert shown(page)["sorted"][:2] == [2 * 3 + 2 * 10, [2, 10]]
    assert shown(page)["packed"][:2] == [20, [1, 10]]
    assert shown(page)["budget"][:2] == [10 + 3 * 4, [3, 4]]
    assert page.run("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize(
    "field, value, says",
    [
        (".own", "10 twenty", "“twenty” is no length"),
        (".own", "0", "whole numbers from 1"),
        (".own", "1 " * 20001, "20000 at most"),
        (".limit", "0", "the fixed length is 0"),
        (".limit", "", "the fixed length is empty"),
        (".budget", "511", "the budget is 511: allowed are whole numbers from 512"),
        (".budget", "", "the budget is empty"),
    ],
)
def test_bad_input_is_told_in_a_line(page, field, value, says):
    set_value(page, field, value)
    assert says in page.run("document.querySelector('.memlab-padding .say').textContent")
    assert shown(page) == {}


@pytest.mark.parametrize(
    "lengths, says",
    [({}, "lengths is empty"), ({"a": []}, "is empty"), ({"a": [3, 0]}, "holds 0")],
)
def test_bad_lengths_raise(lengths, says):
    with pytest.raises(ValueError, match=says):
        PaddingExplorer(lengths)


def test_a_memory_with_other_keys_raises():
    with pytest.raises(ValueError, match="memory has the keys peak: allowed are least, fixed"):
        PaddingExplorer({"a": [1]}, {"peak": 1})


def test_a_name_cannot_be_markup(page):
    page_text = PaddingExplorer({"</script><b>": [1]})._repr_html_()
    assert "</script><b>" not in page_text
    names = page.run("[...document.querySelectorAll('.which option')].map(o => o.textContent)")
    assert names == ["one", "two <b>"]


def test_a_name_with_markup_finds_its_lengths(open_panel):
    given = {"one": [7], "two <b> & 'three' &amp;": [5, 5, 5, 10], "<!--<script>": [3]}
    panel = open_panel(PaddingExplorer(given))
    for name, lengths in given.items():
        set_value(panel, ".which", name)
        assert shown(panel)["fixed"][0] == 512 * len(lengths)
        assert f" {len(lengths)} texts" in panel.run("document.querySelector('.say').textContent")
    assert "two <b> & 'three' &amp;" in repr(PaddingExplorer(given))
