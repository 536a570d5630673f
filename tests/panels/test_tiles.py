"""The tiles of attention follow their film, in a real browser without a network."""

import pytest

from memlab.panels import TilePlayer

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

FILMS = {
    "forward & <b>": [(0, 0, 1024), (1, 0, 2048), (1, 1, 4096)],
    "backward": [(0, 0, 10), (1, 0, 3 * 2**20)],
}
STANDARD = {"forward & <b>": 8192, "backward": 2**20}


@pytest.fixture
def tiles(open_once):
    return open_once(TilePlayer(FILMS, STANDARD))


def kinds(page):
    each = "[...panel.querySelectorAll('rect')]"
    return page.run(f"{each}.map(r => r.getAttribute('class').replace('tile', '').trim())")


def test_every_moment_of_the_film_can_be_reached(tiles):
    names = tiles.run("[...panel.querySelectorAll('option')].map(option => option.textContent)")
    assert names == list(FILMS)  # no markup
    assert kinds(tiles) == ["now", "", "", "query", "key"]
    assert tiles.text(".tiled-text") == "moved so far: 1 KiB"
    assert tiles.text(".whole-text") == "the same pass with the whole matrix: 8 KiB"
    tiles.put(moment=2)
    assert kinds(tiles) == ["done", "done", "now", "query", "key"]
    assert "Tile 3 of 3: queries 2 (blue) meet keys 2" in tiles.said()
    assert tiles.run("panel.querySelector('.tiled').style.width") == "50%"
    tiles.set("pass", "backward")
    assert kinds(tiles) == ["now", "", "query", "key"]
    tiles.put(moment=1)
    assert tiles.text(".tiled-text") == "moved so far: 3 MiB"
    assert tiles.tab.run("document.documentElement.scrollWidth") <= 390


def test_the_film_plays_and_stops(tiles):
    for said in ("pause", "play"):
        tiles.click(".play")
        assert tiles.text(".play") == said
