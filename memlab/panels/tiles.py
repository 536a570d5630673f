"""The panel on tiled attention: which tile of scores exists when, and the bytes moved so far."""

from memlab.panels.panel import Panel


class TilePlayer(Panel):
    """Play or drag through the tiles of a blockwise attention, one after the other.

    films: name -> moments in order, each (row, column, bytes moved so far) of one tile of scores.
        Rows are tiles of queries, columns are tiles of keys; both count from 0.
    standard: name -> bytes that attention with the whole score matrix moves in the same pass, with
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
