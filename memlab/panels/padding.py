"""The panel of ways of padding, without a kernel."""

from memlab.panels.panel import Panel


class PaddingExplorer(Panel):
    """Tokens, widest batch and peak under six ways of padding, for chosen lengths and batches.

    lengths: name of a corpus -> the lengths of its texts in tokens.
    memory: what a batch of r rows, w tokens wide, takes: bytes max(least, fixed + r w (token +
        w pair)), the `room` of a card, and `what` trains on which card, in words. These six keys.
        Without it the panel shows no peak.

    Raises ValueError without a corpus, for an empty one, for lengths that are no whole numbers
    from 1, and for a memory with other keys.
    """

    kind = "padding"
    still = "This panel needs scripts. It counts the tokens of six ways of padding."

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

    def data(self) -> dict:
        return {"lengths": self.lengths, "memory": self.memory}
