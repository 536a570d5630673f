"""The film of an attention in tiles: which tile of scores exists when, and the bytes so far."""

import html
import json

from memlab.panels.panel import read


class TilePlayer:
    """The tiles of an attention computed in blocks, one after the other, to drag or to play.

    films: name -> moments in their order, each (row, column, bytes moved so far) of one tile
        of scores; rows are tiles of queries, columns tiles of keys, both from 0.
    standard: name -> bytes that the attention with a whole matrix moves in the same pass, with
        the same mask.

    In a notebook and on a static page it shows itself; it needs neither a kernel nor a network.
    Without scripts it says so, and shows no control that would do nothing.
    Raises ValueError without a film, for an empty one, for one that has no standard, and for
    moments that are not three whole numbers from 0.
    """

    def __init__(self, films: dict[str, list], standard: dict[str, int]):
        if not films:
            raise ValueError("films is empty: allowed are one or more named lists of moments")
        self.films = {}
        for name, moments in films.items():
            if name not in standard:
                raise ValueError(f"standard has no {name!r}: allowed is a number for each film")
            whole = [len(m) == 3 and all(isinstance(x, int) and x >= 0 for x in m) for m in moments]
            if not moments or not all(whole):
                given = f"holds {moments[whole.index(False)]!r}" if moments else "is empty"
                raise ValueError(
                    f"films[{name!r}] {given}: allowed are moments of three whole numbers from 0"
                )
            film = {"moments": [list(m) for m in moments], "standard": int(standard[name])}
            self.films[html.escape(name)] = film

    def _repr_html_(self) -> str:
        page = read("tiles.html")
        data = json.dumps(self.films).replace("</", "<\\/")
        return page.replace("NAME", "memlab-tiles-1").replace("DATA", data)

    def __repr__(self) -> str:
        return f"TilePlayer of {', '.join(self.films)}"
