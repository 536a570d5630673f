"""The film of an attention in tiles: which tile of scores exists when, and the bytes so far."""

from memlab.panels.panel import Panel


class TilePlayer(Panel):
    """The tiles of an attention computed in blocks, one after the other, to drag or to play.

    films: name -> moments in their order, each (row, column, bytes moved so far) of one tile
        of scores; rows are tiles of queries, columns tiles of keys, both from 0.
    standard: name -> bytes that the attention with a whole matrix moves in the same pass, with
        the same mask.

    Raises ValueError without a film, for an empty one, for one that has no standard, and for
    moments that are not three whole numbers from 0.
    """

    kind = "tiles"
    still = (
        "This panel needs scripts. It plays which tile of scores an attention computes when, and "
        "what it has moved so far."
    )

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
            self.films[name] = film

    def data(self) -> dict:
        return {"films": self.films}
