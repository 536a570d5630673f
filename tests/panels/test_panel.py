"""What holds for every panel: alone and twice on a page, light and dark, small, named, silent."""

import re

import pytest

from memlab import Recipe, panels
from memlab.panels.panel import Panel

SMALL = Recipe("gpt2", batch_size=4, attention="sdpa")
PANELS = [
    panels.AllocatorSandbox(),
    panels.BitExplorer(),
    panels.Calculator(SMALL, "batch_size", "precision", "optimizer"),
    panels.PaddingExplorer({"texts": [12, 87, 40], "others": [5]}),
    panels.SegmentFilm(),
    panels.ServingCalculator(),
    panels.TilePlayer({"forward": [(0, 0, 1024), (1, 0, 2048)]}, {"forward": 4096}),
]
NAMES = [type(panel).__name__ for panel in PANELS]
TWICE = [panel for panel in PANELS for _ in (1, 2)]


@pytest.fixture(scope="module")
def page(open_once):
    return open_once(*TWICE)


@pytest.fixture(params=range(len(TWICE)), ids=[f"{name}-{n}" for name in NAMES for n in (1, 2)])
def panel(request, page):
    page.at = request.param
    return page


def test_it_runs_and_fits_a_phone(panel):
    assert panel.run("panel.querySelector('.off').hidden && !panel.querySelector('.on').hidden")
    assert panel.run("panel.scrollWidth <= panel.clientWidth")
    assert panel.tab.run("document.documentElement.scrollWidth") <= 390
    assert panel.run("panel.querySelectorAll('[role=status]').length") == 1
    assert panel.run("panel.innerText.length") > 100


def test_what_can_be_pressed_has_a_name_and_a_size(panel):
    # A bit is as narrow as 32 of them side by side allow: arrow keys move among them.
    found = panel.run("""[...panel.querySelectorAll('button, input, select, textarea')]
        .filter(one => one.getClientRects().length && !one.closest('.part')).map(one => [
        (one.getAttribute('aria-label') || one.closest('label')?.textContent || one.textContent)
            .trim(), one.getBoundingClientRect().height, one.getBoundingClientRect().width])""")
    assert len(found) > 2
    for name, height, width in found:
        assert name and height >= 23 and width >= 23
    pictures = "[...panel.querySelectorAll('svg[role=img]')]"
    assert panel.run(f"{pictures}.every(svg => svg.getAttribute('aria-label').length > 10)")
    assert panel.run("panel.querySelectorAll('[id]').length") == 0


def test_a_figure_stands_below_its_name_in_jupyterlab_too(open_once):
    """Its style sets a `dt` of an output to the left of what follows."""
    page = open_once(panels.SegmentFilm(), body=' class="jp-OutputArea-output"')
    page.tab.run("""document.head.insertAdjacentHTML("beforeend",
        "<style>.jp-OutputArea-output dt { float: left; width: 20% }</style>")""")
    gaps = page.run("""[...panel.querySelectorAll('dl dt')]
        .map(name => [name.nextElementSibling, name].map(one => one.getBoundingClientRect()))
        .map(([figure, name]) => figure.top - name.bottom)""")
    assert len(gaps) == 5 and min(gaps) >= 0


def test_equal_panels_do_not_touch_each_other(page):
    for at in range(0, len(TWICE), 2):
        page.at = at + 1
        before = page.run("panel.innerHTML")
        page.at = at
        for button in range(page.run("panel.querySelectorAll('button').length")):
            page.run(f"panel.querySelectorAll('button')[{button}]?.click()")
        page.run("""panel.querySelectorAll('input[type=range]').forEach(field => {
            field.value = field.max;
            field.dispatchEvent(new Event('input', { bubbles: true }));
        })""")
        page.at = at + 1
        assert page.run("panel.innerHTML") == before


@pytest.mark.parametrize("wish", ["light", "dark"])
@pytest.mark.parametrize("theme", ["", "light", "dark"])
def test_it_follows_the_books_theme_and_else_the_readers_wish(page, wish, theme):
    scheme = {"name": "prefers-color-scheme", "value": wish}
    page.tab.send("Emulation.setEmulatedMedia", features=[scheme])
    page.tab.run(f"document.documentElement.dataset.theme = '{theme}'")
    for page.at in range(len(TWICE)):
        paper, ink = (
            sum(map(int, re.findall(r"\d+", page.run(f"getComputedStyle(panel).{colour}"))[:3])) / 3
            for colour in ("backgroundColor", "color")
        )
        assert (paper > 200 and ink < 80) if (theme or wish) == "light" else paper < 60 < ink


@pytest.mark.parametrize("shown", PANELS, ids=NAMES)
def test_it_is_always_the_same_and_asks_for_nothing(shown):
    page = shown._repr_html_()
    assert page == shown._repr_html_() and type(shown).__name__ in repr(shown)
    still = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    assert shown.still in still and '<div class="on" hidden>' in still
    # The calculator's button looks a config up, when it is pressed (test_calculator.py).
    rest = page.replace(
        "await fetch(`https://huggingface.co/", "", type(shown) is panels.Calculator
    )
    assert not re.search(r"\b(src|fetch|import)\b|<link|url\(|\{\{", rest)
    # The book's theme has rules of its own for these.
    assert not re.search(
        r"class[=:] ?\"([^\"]* )?(row|card|col|container|btn|badge|progress)[ \"]", page
    )
    assert page.count("</script>") == 1 and isinstance(shown, Panel)
