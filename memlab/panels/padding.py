"""The panel of ways of padding, without a kernel."""

from memlab.panels.panel import Panel


class PaddingExplorer(Panel):
    """Tokens, widest batch and peak under six ways of padding, for chosen lengths and batches.

    lengths: name of a corpus -> the lengths of its texts in tokens.
    memory: what a batch of r rows, w tokens wide, takes: bytes max(least, fixed + r w (token +
        w pair)), the `room` of a card, and `what` trains on which card, in words. These six keys.
        Without it the panel shows no peak.
    """

    kind = "padding"
    still = "This panel needs scripts. It counts the tokens of six ways of padding."

    def __init__(self, lengths: dict[str, list[int]], memory: dict | None = None):
        self.lengths = {name: list(map(int, values)) for name, values in lengths.items()}
        self.memory = memory

    def data(self) -> dict:
        return {"lengths": self.lengths, "memory": self.memory}
