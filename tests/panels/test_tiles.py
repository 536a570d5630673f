"""The tiles of attention follow their film, in a real browser without a network."""

import re

import pytest

from memlab.panels import TilePlayer

pytestmark = pytest.mark.slow  # a browser beside Python: left to make nightly

FILMS = {
    "forward & <b>": [(0, 0, 1024), (1, 0, 2048), (1, 1, 4096)],
    "backward": [(0, 0, 10), (1, 0, 3 * 2**20)],
}
STANDARD = {"forward & <b>": 8192, "backward": 2**20}


@pytest.fixture
def tiles(open_panel):
    return open_panel(TilePlayer(FILMS, STANDARD))


def tile_kinds(tab):
    tiles = "[...document.querySelectorAll('.memlab-tiles rect')]"
    return tab.run(f"{tiles}.map(r => r.getAttribute('class').replace('tile', '').trim())")


def tile_text(tab, name):
    return tab.run(f"document.querySelector('.memlab-tiles {name}').textContent")


def set_tile_field(tab, name, change):
    tab.run(f"""(() => {{
        const field = document.querySelector('.memlab-tiles {name}');
        field.{change};
        field.dispatchEvent(new Event('input', {{bubbles: true}}));
    }})()""")


def test_every_moment_of_the_film_can_be_reached(tiles):
    assert tile_kinds(tiles) == ["now", "", "", "query", "key"]
    assert tile_text(tiles, ".tiled-text") == "moved so far: 1 KiB"
    assert tile_text(tiles, ".whole-text") == "the same pass with the whole matrix: 8 KiB"
    set_tile_field(tiles, ".at", "value = 2")
    assert tile_kinds(tiles) == ["done", "done", "now", "query", "key"]
    assert "Tile 3 of 3: queries 2 (blue) meet keys 2" in tile_text(tiles, ".say")
    assert tile_text(tiles, ".tiled-text") == "moved so far: 4 KiB"
    assert tiles.run("document.querySelector('.memlab-tiles .tiled').style.width") == "50%"
    set_tile_field(tiles, ".which", "selectedIndex = 1")
    assert tile_kinds(tiles) == ["now", "", "query", "key"]
    set_tile_field(tiles, ".at", "value = 1")
    assert tile_text(tiles, ".tiled-text") == "moved so far: 3.00 MiB"
    assert tiles.run("document.documentElement.scrollWidth") <= 390


def test_the_film_plays_and_stops(tiles):
    button = "document.querySelector('.memlab-tiles .play')"
    tiles.run(f"{button}.click()")
    assert tile_text(tiles, ".play") == "stop"
    tiles.run(f"{button}.click()")
    assert tile_text(tiles, ".play") == "play"


def test_without_scripts_the_tiles_say_so_and_show_no_control(open_panel):
    class Still(TilePlayer):
        def _repr_html_(self):
            return re.sub(r"<script>.*?</script>", "", super()._repr_html_(), flags=re.DOTALL)

    shown = "document.querySelector('.memlab-tiles').innerText.trim()"
    controls = "[...document.querySelectorAll('button, input, select')]"
    still = open_panel(Still(FILMS, STANDARD))
    assert still.run(shown) == "This panel plays with scripts only."
    assert set(still.run(f"{controls}.map(control => control.offsetHeight)")) == {0}
    assert "with scripts only" not in open_panel(TilePlayer(FILMS, STANDARD)).run(shown)


@pytest.mark.parametrize(
    "films, standard, says",
    [
        ({}, {}, "films is empty"),
        ({"a": []}, {"a": 1}, r"films\['a'\] is empty"),
        ({"a": [(0, 0, 1)]}, {}, "standard has no 'a'"),
        ({"a": [(0, 0, 1), (0, -1, 1)]}, {"a": 1}, r"holds \(0, -1, 1\)"),
        ({"a": [(0, 1)]}, {"a": 1}, "three whole numbers"),
    ],
)
def test_bad_films_raise_in_one_line(films, standard, says):
    with pytest.raises(ValueError, match=says) as error:
        TilePlayer(films, standard)
    assert "\n" not in str(error.value)


def test_a_name_of_a_film_cannot_be_markup(tiles):
    assert "<b>" not in TilePlayer(FILMS, STANDARD)._repr_html_()
    names = tiles.run("[...document.querySelectorAll('.which option')].map(o => o.textContent)")
    assert names == list(FILMS)
