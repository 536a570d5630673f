"""The panel that compares six ways of padding."""

from memlab.panels.panel import Panel


class PaddingExplorer(Panel):
    """Tokens, widest batch and peak memory under six ways of padding.

    lengths: name of a corpus -> the lengths of its texts in tokens.
    memory: how much memory a batch needs, as six keys; without it the panel shows no peak. A batch
        of r rows and w tokens takes max(least, fixed + r * w * (token + w * pair)) bytes. The keys
        are `least`, `fixed`, `token`, `pair`, `room` (bytes of the GPU) and `what` (in words, which
        training on which GPU).
    """

    kind = "padding"
    still = "This panel needs scripts. It counts the tokens of six ways of padding."

    def __init__(self, lengths: dict[str, list[int]], memory: dict | None = None):
        self.lengths = {name: list(map(int, values)) for name, values in lengths.items()}
        self.memory = memory

    def data(self) -> dict:
        return {"lengths": self.lengths, "memory": self.memory}
