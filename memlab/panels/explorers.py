"""Panels of a page on which readers try things out, without a kernel: padding, attention."""

import html
import json

from memlab.panels.panel import read


class PaddingExplorer:
    """Tokens, widest batch and peak under six ways of padding, for chosen lengths and batches.

    lengths: name of a corpus -> the lengths of its texts in tokens.
    memory: what a batch of r rows, w tokens wide, takes: bytes max(least, fixed + r w (token +
        w pair)), the `room` of a card, and `what` trains on which card, in words. These six keys.
        Without it the panel shows no peak.

    In a notebook and on a static page it shows itself; it needs neither a kernel nor a network.
    Raises ValueError without a corpus, for an empty one, for lengths that are no whole numbers
    from 1, and for a memory with other keys.
    """

    def __init__(self, lengths: dict[str, list[int]], memory: dict | None = None):
        if not lengths:
            raise ValueError("lengths is empty: allowed are one or more named lists of lengths")
        self.lengths = {}
        for name, values in lengths.items():
            values = [int(n) if float(n).is_integer() else n for n in values]
            wrong = [n for n in values if not isinstance(n, int) or n < 1]
            if wrong or not values:
                given = f"holds {wrong[0]!r}" if wrong else "is empty"
                raise ValueError(f"lengths[{name!r}] {given}: allowed are whole numbers from 1")
            self.lengths[name] = values
        keys = ("least", "fixed", "token", "pair", "room", "what")
        if memory is not None and set(memory) != set(keys):
            given = ", ".join(memory) or "empty"
            raise ValueError(f"memory has the keys {given}: allowed are {', '.join(keys)}")
        self.memory = memory

    def _repr_html_(self) -> str:
        page = read("padding.html")
        page = page.replace("NAME", "memlab-padding-1")
        for mark, data in {"PEAK": self.memory, "DATA": self.lengths}.items():
            text = json.dumps(data).replace("<", "\\u003c")  # no tag can begin in the script
            page = page.replace(f"= {mark};", f"= {text};")
        return page

    def __repr__(self) -> str:
        return f"PaddingExplorer of {', '.join(self.lengths)}"


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
