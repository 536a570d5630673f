"""The film of an attention in tiles: which tile of scores exists when, and the bytes so far."""

from memlab.panels.panel import Panel


class TilePlayer(Panel):
    """The tiles of an attention computed in blocks, one after the other, to drag or to play.

    films: name -> moments in their order, each (row, column, bytes moved so far) of one tile
        of scores; rows are tiles of queries, columns tiles of keys, both from 0.
    standard: name -> bytes that the attention with a whole matrix moves in the same pass, with
        the same mask.
    """

    kind = "tiles"
    still = (
        "This panel needs scripts. It plays which tile of scores an attention computes when, and "
        "what it has moved so far."
    )

    def __init__(self, films: dict[str, list], standard: dict[str, int]):
        self.films = {
            name: {"moments": moments, "standard": int(standard[name])}
            for name, moments in films.items()
        }

    def data(self) -> dict:
        return {"films": self.films}
