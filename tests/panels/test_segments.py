"""Segments of the page hold what Python counts, and what a traced chain really holds."""

import pytest
from segments_twin import figures, held

from memlab.panels import SegmentFilm

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly


@pytest.fixture(scope="module")
def page(open_once):
    return open_once(SegmentFilm())


@pytest.mark.parametrize("layers", [2, 7, 48])
@pytest.mark.parametrize("segment", [0, 1, 2, 5, 48])
@pytest.mark.parametrize("ratio", [1, 4, 40])
def test_the_page_says_what_python_computes(page, layers, segment, ratio):
    page.put(layers=layers, segment=segment, ratio=ratio)
    assert page.figures() == figures(layers, segment, ratio)


@pytest.mark.parametrize("layers, segment, ratio", [(9, 0, 4), (9, 3, 4), (7, 2, 5), (6, 1, 3)])
def test_each_moment_is_pythons_and_bars_add_up_to_it(page, layers, segment, ratio):
    page.put(layers=layers, segment=segment, ratio=ratio)
    for at, units in enumerate(held(layers, segment, ratio)):
        page.set("moment", at)
        bars = page.run("""[...panel.querySelectorAll('.rows rect:not(.late)')].map(
            bar => [bar.dataset.layer, Number(bar.dataset.units)])""")
        biggest = dict(sorted(bars))  # what a layer keeps has its checkpoint in it
        assert page.run("Number(panel.dataset.held)") == units == sum(biggest.values())
    page.set("moment", at + 1)
    assert "At most" in page.said()


def test_it_plays_and_goes_round(page):
    page.put(layers=4, segment=2)
    page.click(".forth")
    assert page.moment() == 0
    page.click(".back")
    assert page.moment() == 12
    page.click(".play")
    assert 1 <= page.moment(after=2300) < 12
    page.set("ratio", 3)
    assert page.text(".play") == "play" and page.moment() == 12
