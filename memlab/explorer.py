"""A panel of a page on which readers try padding on their own lengths, without a kernel."""

from __future__ import annotations

import html
import json
from importlib import resources


class PaddingExplorer:
    """Tokens computed under five ways of padding, for chosen lengths, batch size and limit.

    lengths: name of a corpus -> the lengths of its texts in tokens. In a notebook and on a static
        page it shows itself; it needs neither a kernel nor a network.

    Raises ValueError without a corpus, for an empty one, and for lengths that are no whole numbers
    from 1.
    """

    def __init__(self, lengths: dict[str, list[int]]):
        if not lengths:
            raise ValueError("lengths is empty: allowed are one or more named lists of lengths")
        self.lengths = {}
        for name, values in lengths.items():
            values = [int(n) if float(n).is_integer() else n for n in values]
            wrong = [n for n in values if not isinstance(n, int) or n < 1]
            if wrong or not values:
                given = f"holds {wrong[0]!r}" if wrong else "is empty"
                raise ValueError(f"lengths[{name!r}] {given}: allowed are whole numbers from 1")
            self.lengths[html.escape(name)] = values

    def _repr_html_(self) -> str:
        page = resources.files("memlab.data").joinpath("padding.html").read_text(encoding="utf8")
        data = json.dumps(self.lengths).replace("</", "<\\/")
        return page.replace("NAME", "memlab-padding-1").replace("DATA", data)

    def __repr__(self) -> str:
        return f"PaddingExplorer of {', '.join(self.lengths)}"
