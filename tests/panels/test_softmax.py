"""The running softmax ends where the whole one does; the page says what Python computes."""

import math

import pytest
import torch

from memlab.book.chapters.softmax import ROWS, VALUES, RunningSoftmax, running, whole

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly


@pytest.fixture(scope="module")
def page(open_once):
    return open_once(RunningSoftmax(ROWS | {"</script><b>": [1, 2]}))


@pytest.mark.parametrize("tile", [1, 3, 5, 12])
@pytest.mark.parametrize("name", ROWS)
def test_it_ends_at_the_whole_softmax(name, tile):
    scores, values = ROWS[name], VALUES[: len(ROWS[name])]
    last = running(scores, values, tile)[-1]
    x, v = (torch.tensor(given, dtype=torch.float64) for given in (scores, values))
    exact = x.softmax(0) @ v
    assert last.output / last.total == pytest.approx(exact.item(), abs=1e-12)
    assert whole(scores, values) == pytest.approx(exact.item(), abs=1e-12)


@pytest.mark.parametrize("tile", [1, 5, 12])
@pytest.mark.parametrize("name", ROWS)
def test_each_step_of_the_page_is_pythons(page, name, tile):
    page.set("row", name)
    page.set("tile", tile)
    scores, values = ROWS[name], VALUES[: len(ROWS[name])]
    for number, step in enumerate(running(scores, values, tile), 1):
        page.click(".forth")
        found = page.figures()
        assert [found[key] for key in ("m", "factor", "total", "output")] == pytest.approx(
            list(step), rel=1e-12
        )
        assert page.run("panel.querySelectorAll('tbody tr').length") == number
        bars = page.run("[...panel.querySelectorAll('[data-weight]')].map(b => +b.dataset.weight)")
        seen = scores[: number * tile]
        assert bars == pytest.approx([math.exp(x - step.m) for x in seen], rel=1e-12)
    assert found["result"] == pytest.approx(whole(scores, values), abs=1e-12)
    assert "gives the same output" in page.text(".say")
    page.click(".forth")
    assert page.figures() == found  # there is no step after the last
    page.click(".back")
    assert page.figures() != found or tile == 12


def test_it_plays_to_the_end_and_can_be_stopped(page):
    page.set("row", "rising")
    page.set("tile", 6)
    page.click(".play")
    assert page.text(".play") == "pause"
    page.click(".play")
    assert page.text(".play") == "play"
    page.click(".play")
    assert page.moment(after=2700) == 2 and page.text(".play") == "play"


def test_own_scores_and_nonsense(page):
    page.set("row", "usual")
    page.set("tile", 1)
    page.set("own", "1, -inf; 3")
    for _ in range(3):
        page.click(".forth")
    assert page.figures()["result"] == pytest.approx(whole([1, -math.inf, 3], VALUES[:3]))
    before = page.figures()
    for wrong, says in (
        ("1 two", "“two” is no score"),
        ("inf", "“inf” is no score"),
        ("1 " * 25, "25 scores: allowed are 1 to 24"),
        (",", "0 scores"),
    ):
        page.set("own", wrong)
        assert says in page.text(".say")
        assert page.figures() == before
    page.set("own", "-inf -inf")
    page.set("moment", 2)
    assert "no softmax" in page.text(".say")
    page.set("row", "</script><b>")
    page.set("moment", 2)
    assert page.figures()["m"] == 2


@pytest.mark.parametrize(
    "rows, says",
    [({}, "rows is empty"), ({"a": []}, "has 0 scores"), ({"a": [math.inf]}, "holds inf")],
)
def test_bad_input_raises(rows, says):
    with pytest.raises(ValueError, match=says):
        RunningSoftmax(rows)
