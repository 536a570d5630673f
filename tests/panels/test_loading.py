"""The lanes follow chapter 11's schedule; the page says what Python computes."""

import pytest

from memlab.book.chapters.loading import LoaderLanes, figures

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly


@pytest.fixture(scope="module")
def page(open_once):
    return open_once(LoaderLanes())


@pytest.mark.parametrize("loading", ["work", "wait"])
@pytest.mark.parametrize(
    "fields",
    [
        dict(workers=0, cores=1, prefetch=2, uneven=1, seconds=0.03, compute=0.02),
        dict(workers=3, cores=4, prefetch=1, uneven=7, seconds=0.06, compute=0.02),
        dict(workers=8, cores=2, prefetch=2, uneven=1, seconds=0.3, compute=0.05),
        dict(workers=4, cores=4, prefetch=8, uneven=10, seconds=1.9, compute=1),
        dict(workers=16, cores=16, prefetch=2, uneven=20, seconds=5, compute=40),
    ],
)
def test_the_page_says_what_python_computes(page, loading, fields):
    page.set("loading", loading)
    for name, value in fields.items():
        page.set(name, value)
    given = dict(fields, cores=None) if loading == "wait" else fields
    assert page.figures() == pytest.approx(figures(**given), rel=1e-9, abs=1e-12)
    lanes = "[...panel.querySelectorAll('.lane')].map(lane => lane.querySelectorAll('rect').length)"
    gpu, *workers = page.run(lanes)
    assert gpu == 24 and len(workers) == max(1, fields["workers"]) and sum(workers) >= 24
    assert page.run("panel.querySelector('[name=cores]').disabled") == (loading == "wait")


def test_every_field_changes_a_figure(page):
    start = dict(workers=2, cores=1, prefetch=1, uneven=8, seconds=0.018, compute=0.02)
    page.set("loading", "work")
    other = dict(workers=5, cores=2, prefetch=6, uneven=1, seconds=0.01, compute=0.2)
    for name, value in other.items():
        for field, begin in start.items():
            page.set(field, begin)
        before = page.figures()
        page.set(name, value)
        assert page.figures() != before, name


def test_by_the_formula_in_the_long_run():
    for workers, cores, step in ((0, 4, 0.08), (1, 4, 0.06), (2, 4, 0.03), (4, 4, 0.02)):
        assert figures(0.06, 0.02, workers, cores, 1, 2)["step"] == pytest.approx(step, rel=0.02)
    assert figures(0.06, 0.02, 4, 2, 1, 2)["step"] == pytest.approx(0.03, rel=0.02)
    assert figures(0.06, 0.02, 4, None, 1, 2)["enough"] == 3
    assert figures(0.06, 0.02, 4, 2, 1, 2)["enough"] == 0


@pytest.mark.parametrize("wrong", ["", "0", "-1", "101"])
def test_nonsense_is_told(page, wrong):
    before = page.figures()
    page.set("seconds", wrong)
    assert "allowed are 0.001 to 100" in page.text(".say")
    assert page.figures() == before
    page.set("seconds", 0.06)


def test_bad_input_raises():
    with pytest.raises(ValueError, match="workers is 17: allowed are whole numbers from 0 to 16"):
        LoaderLanes(workers=17)
    with pytest.raises(ValueError, match="compute is 0"):
        LoaderLanes(compute=0)
