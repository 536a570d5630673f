"""The tiles of attention follow their film, in a real browser without a network."""

import re
from types import SimpleNamespace

import pytest

from memlab.panels import TilePlayer

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

FILMS = {
    "forward & <b>": [(0, 0, 1024), (1, 0, 2048), (1, 1, 4096)],
    "backward": [(0, 0, 10), (1, 0, 3 * 2**20)],
}
STANDARD = {"forward & <b>": 8192, "backward": 2**20}
KIND = ".memlab-tiles"


@pytest.fixture
def tiles(open_once):
    return open_once(TilePlayer(FILMS, STANDARD), kind=KIND)


def kinds(page):
    each = "[...panel.querySelectorAll('rect')]"
    return page.run(f"{each}.map(r => r.getAttribute('class').replace('tile', '').trim())")


def test_every_moment_of_the_film_can_be_reached(tiles):
    names = tiles.run("[...panel.querySelectorAll('.which option')].map(o => o.textContent)")
    assert names == list(FILMS)  # no markup
    assert kinds(tiles) == ["now", "", "", "query", "key"]
    assert tiles.text(".tiled-text") == "moved so far: 1 KiB"
    assert tiles.text(".whole-text") == "the same pass with the whole matrix: 8 KiB"
    tiles.set(".at", 2)
    assert kinds(tiles) == ["done", "done", "now", "query", "key"]
    assert "Tile 3 of 3: queries 2 (blue) meet keys 2" in tiles.said()
    assert tiles.run("panel.querySelector('.tiled').style.width") == "50%"
    tiles.run("panel.querySelector('.which').selectedIndex = 1")
    tiles.run("panel.querySelector('.which').dispatchEvent(new Event('input', {bubbles: true}))")
    assert kinds(tiles) == ["now", "", "query", "key"]
    tiles.set(".at", 1)
    assert tiles.text(".tiled-text") == "moved so far: 3.00 MiB"
    assert tiles.tab.run("document.documentElement.scrollWidth") <= 390


def test_the_film_plays_and_stops(tiles):
    for said in ("stop", "play"):
        tiles.click(".play")
        assert tiles.text(".play") == said


def test_without_scripts_the_tiles_say_so_and_show_no_control(open_once):
    page = TilePlayer(FILMS, STANDARD)._repr_html_()
    still = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    shown = open_once(SimpleNamespace(_repr_html_=lambda: still), kind=KIND)
    assert shown.run("panel.innerText.trim()") == "This panel plays with scripts only."


@pytest.mark.parametrize(
    "films, says",
    [
        ({}, "films is empty"),
        ({"a": []}, r"films\['a'\] is empty"),
        ({"b": [(0, 0, 1)]}, "standard has no 'b'"),
        ({"a": [(0, 0, 1), (0, -1, 1)]}, r"holds \(0, -1, 1\)"),
        ({"a": [(0, 1)]}, "three whole numbers"),
    ],
)
def test_bad_films_raise(films, says):
    with pytest.raises(ValueError, match=says):
        TilePlayer(films, {"a": 1})
